"""Every few minutes, on drained nodes too: look, act, return to service.  One at a time; on a healthy node no Slurm command."""

import os
import time

from . import comeback, drain, engine, files, hints, ledger, metrics, recheck, settle, slurm
from .checks import FAIL, OK, UNKNOWN, WARN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checks import Result
    from .nodes import Node
    from .world import World

BOOTED = "booted.json"
FOREIGN_S = 3600.0


def run(world: "World") -> None:
    """The whole round; a second copy ends at once: slurmctld starts the next one whether or not this one has ended."""
    lock = files.Lock(world.path("periodic.lock"))
    if not lock.acquire():
        ledger.record(world, "overlap", why="the last round still runs")
        return
    try:
        _round(world)
    finally:
        lock.release()


def _round(world: "World") -> None:
    started = time.monotonic()
    booted = files.read_json(world.path(BOOTED))
    first = booted.get("boot") != world.boot
    if first:
        booted = {"boot": world.boot, "at": time.time(), "foreign": _drain_that_a_reboot_may_lose(world)}
        files.write_json(world.path(BOOTED), booted)
    recheck.unfinished_epilogs(world)
    hinted = hints.collect(world)
    own = drain.own(world)
    chosen = engine.plans(world, "boot" if first else "periodic")
    if own or hinted:
        known = {plan.name for plan in chosen}
        chosen += [plan for plan in engine.plans(world, "all") if plan.name not in known and "epilog" not in plan.contexts[:1]]
    results = engine.run(world, chosen)
    told = engine.remember(world, results)
    try:
        _bring_back_a_foreign_drain(world, booted)
        comeback.look_back(world) if _watching(world) else None
        recheck.pending_verdict(world, results)
        if own:
            why = comeback.try_return(world, _well(results, str(own.get("check", ""))))
            if why != own.get("stays"):
                ledger.record(world, "stays_out", why=why) if drain.own(world) else None
    except (slurm.NoAnswer, slurm.Refused) as error:
        ledger.record(world, "no_answer", why=str(error))
    settle.settle(world, chosen, results, told)
    metrics.write(world, told, time.monotonic() - started)


def _watching(world: "World") -> bool:
    return os.path.exists(world.path(comeback.RETURNS)) and bool(files.read_json(world.path(comeback.RETURNS)).get("watch"))


def _well(results: "list[Result]", check: str) -> bool:
    """The failed check passes, and no other one fails or is silent.  Flags and the job's own faults do not keep a node out."""
    names = {result.check for result in results}
    if any(result.status == FAIL for result in results):
        return False
    base = [result for result in results if result.check == check]
    if check in names and any(result.status not in (OK, WARN) for result in base):
        return False
    return not any(result.status == UNKNOWN for result in results)


def _drain_that_a_reboot_may_lose(world: "World") -> "dict[str, object]":
    """Somebody's drain of a rebooting node, which slurmctld drops when the node registers.  We run before that."""
    try:
        node = slurm.this_node(slurm.all_nodes(world), world.node)
    except slurm.NoAnswer as error:
        ledger.record(world, "no_answer", why=str(error))
        return {}
    if node is None or not node.drained or node.ours or _slurms_own(node):
        return {}
    return {"reason": node.reason, "user": node.user, "since": node.since}


def _slurms_own(node: "Node") -> bool:
    return not node.reason or node.reason.lower().startswith(("reboot asap", "not responding", "node unexpectedly rebooted"))


def _bring_back_a_foreign_drain(world: "World", booted: "dict[str, object]") -> None:
    """It was there when the node came up and is gone right after: set it again, once, in the same words."""
    foreign = booted.get("foreign")
    if not isinstance(foreign, dict) or not foreign:
        return
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    late = time.time() - float(str(booted.get("at", 0))) > FOREIGN_S
    if node is None or (node.untouchable and not late):
        return
    booted["foreign"] = {}
    files.write_json(world.path(BOOTED), booted)
    if not node.drained and not late:
        drain.give_back(world, {"reason": str(foreign["reason"]), "user": str(foreign.get("user", ""))})
