"""Returns this node to service: only from our own drain, only after it has passed, never against an admin or a reboot."""

import time

from . import drain, files, ledger, reason, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .nodes import Node
    from .world import World

RETURNS = "returns.json"
WATCH_S = 120.0  # how long after a return accounting is asked whether somebody's drain was wiped by it


def may_return(
    node: "Node | None", own: "dict[str, object]", passes: int, wanted: int, held_s: float, hold_s: float, today: int, most: int
) -> str:
    """Why not yet, or not at all; "" when the node may come back.  Pure."""
    if node is None:
        return "Slurm does not know the node"
    if not node.drained:
        return "gone: the node is not drained any more"
    why = drain.is_ours(node, own)
    if why:
        return f"gone: {why}"
    if node.untouchable or node.flags & frozenset(["DOWN", "FAIL"]):
        return f"the node is {node.state}"
    if node.held:
        return "the node is on hold"
    if passes < wanted:
        return f"{passes} of {wanted} passes"
    if held_s < hold_s:
        return f"drained for {held_s:.0f} s of at least {hold_s:.0f}"
    if today >= most:
        return f"it came back {today} times within a day already: left for a human"
    return ""


def try_return(world: "World", all_ok: bool) -> str:
    """One more look at our own drain; the sentence for why it stays, or "returned".  Raises slurm.NoAnswer."""
    lock = files.Lock(world.path(drain.LOCK))
    if not lock.acquire(5.0):
        return "another hook on this node is just draining it"
    try:
        return _try_return(world, all_ok)
    finally:
        lock.release()


def _try_return(world: "World", all_ok: bool) -> str:
    own = drain.own(world)
    if not own:
        return "nothing to return"
    if not own.get("confirmed"):
        drain.confirm(world)
        own = drain.own(world)
        if not own:
            return "taken back"
    passes = files.integer(own.get("passes")) + 1 if all_ok else 0
    own["passes"] = passes
    drain.remember(world, own)
    if not all_ok:
        return "a check still fails"
    today = _today(world)
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    why = may_return(
        node, own, passes, int(world.number("return", "passes", 3)), held_s(own, world.boot),
        world.number("return", "hold_s", 600), len(today), int(world.number("return", "per_day", 3)),
    )  # fmt: skip
    if why.startswith("gone"):
        drain.forget(world)
        ledger.record(world, "drain_gone", why=why, reason=own.get("reason"))
        return why
    if why or node is None:
        return why
    at = time.time()
    slurm.put_back(world)
    files.write_json(world.path(RETURNS), {"at": [*today, at], "watch": True, "reason": own["reason"]}, sync=True)
    drain.forget(world)
    ledger.record(world, "returned", reason=own["reason"], passes=passes)
    _mark(world, str(own.get("check", "")), at)
    time.sleep(min(slurm.SETTLE_S, world.remaining(slurm.SETTLE_S)))
    look_back(world)
    return "returned"


def held_s(own: "dict[str, object]", boot: str) -> float:
    """How long the drain has stood: by the clock that does not jump.  One of an earlier boot has stood for all of this one."""
    if own.get("boot") == boot and "steady" in own:
        return time.monotonic() - files.number(own["steady"], time.monotonic())
    return max(time.monotonic(), time.time() - files.number(own.get("at"), time.time()))


def _mark(world: "World", check: str, at: float) -> None:
    """In the comment: the flag goes, the return stays for the sliding window."""
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    if node is not None:
        comment = reason.without_note(node.comment, "flag", check)
        slurm.update(world, "Comment=" + reason.with_note(comment, "back", check, at))


def look_back(world: "World") -> None:
    """Did our return wipe a drain that an admin set between our look and our write?  Then it is set again."""
    last = files.read_json(world.path(RETURNS))
    times = last.get("at")
    if not last.get("watch") or not isinstance(times, list) or not times:
        return
    at = files.number(times[-1])
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    if node is not None and not node.drained and not node.untouchable:
        foreign = drain.wiped(world, at, str(last.get("reason", "")))
        if foreign:
            drain.give_back(world, foreign)
            last["watch"] = False
    if time.time() - at > WATCH_S or (node is not None and node.drained):
        last["watch"] = False
    files.write_json(world.path(RETURNS), last)


def _today(world: "World") -> "list[float]":
    times = files.read_json(world.path(RETURNS)).get("at")
    now, known = time.time(), [files.number(at) for at in times] if isinstance(times, list) else []
    # One of the future was written by a clock that was wrong, and would count for years
    return [at for at in known if -3600.0 < now - at < 86400.0]
