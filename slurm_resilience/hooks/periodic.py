"""Every few minutes, on drained nodes too: look, act, return to service.  One at a time; on a healthy node no Slurm command."""

import os
import time

from . import comeback, drain, engine, files, hints, ledger, marks, metrics, recheck, settle, slurm, station
from .checks import FAIL, FLAG, JOB, UNKNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .checks import Result
    from .nodes import Node
    from .world import World

BOOTED = "booted.json"
FOREIGN_S = 3600.0
REBOOTS = frozenset(["REBOOT_ISSUED", "REBOOT_REQUESTED", "REBOOT"])


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
    files.sweep(world.state)
    files.sweep(world.path(marks.FOLDER))
    booted = files.read_json(world.path(BOOTED))
    first = booted.get("boot") != world.boot
    if first:
        booted = {"boot": world.boot, "at": time.time(), "foreign": _drain_that_a_reboot_may_lose(world)}
        files.write_json(world.path(BOOTED), booted)
    station.attempt(world, "killed epilogs", lambda: recheck.unfinished_epilogs(world))
    hinted = []  # type: list[dict[str, object]]
    station.attempt(world, "hints", lambda: hinted.extend(hints.collect(world)))
    own = drain.own(world)
    chosen = engine.plans(world, "boot" if first else "periodic")
    if own or hinted:
        known = {plan.name for plan in chosen}
        chosen += [plan for plan in engine.plans(world, "all") if plan.name not in known]
    results = engine.run(world, chosen)
    told = engine.remember(world, results)
    _asked(world, "a drain of before the boot", lambda: _bring_back_a_foreign_drain(world, booted))
    if _watching(world):
        _asked(world, "the last return", lambda: comeback.look_back(world))
    _asked(world, "a verdict that waits", lambda: recheck.pending_verdict(world, results))
    if own:
        well = _well(world, results, str(own.get("check", "")))
        _asked(world, "the way back", lambda: _say_once(world, comeback.try_return(world, well)))
    station.attempt(world, "what follows", lambda: _settle(world, chosen, results, told))
    station.attempt(world, "metrics", lambda: metrics.write(world, told, time.monotonic() - started))


def _asked(world: "World", what: str, step: "Callable[[], None]") -> None:
    """A step that asks Slurm: without an answer the next one is not worse off."""

    def asked() -> None:
        try:
            step()
        except (slurm.NoAnswer, slurm.Refused) as error:
            ledger.record(world, "no_answer", why=str(error))

    station.attempt(world, what, asked)


def _settle(world: "World", chosen: "list[engine.Plan]", results: "list[Result]", told: "dict[str, dict[str, object]]") -> None:
    settle.settle(world, chosen, results, told)


def _watching(world: "World") -> bool:
    return os.path.exists(world.path(comeback.RETURNS)) and bool(files.read_json(world.path(comeback.RETURNS)).get("watch"))


def _say_once(world: "World", why: str) -> None:
    """Why the node stays out, when that is news."""
    own = drain.own(world)
    news = why.rstrip("0123456789")
    if own and own.get("stays") != news:
        own["stays"] = news
        drain.remember(world, own)
        ledger.record(world, "stays_out", why=why)


def _well(world: "World", results: "list[Result]", check: str) -> bool:
    """The failed check passes, and no other one fails or is silent.  Flags and the job's own faults do not keep a node out.

    A check that is not configured any more, or is off, cannot pass: then the rest has to do.
    """
    for result in results:
        grave = result.check == check or (result.blame != JOB and result.severity != FLAG)
        if result.status == UNKNOWN or (result.status == FAIL and grave):
            return False
    made = {plan.name for plan in engine.plans(world, "all")}
    return any(result.check == check for result in results) or check not in made


def _drain_that_a_reboot_may_lose(world: "World") -> "dict[str, object]":
    """Somebody's drain of a rebooting node, which slurmctld drops when the node registers.  We run before that."""
    try:
        node = slurm.this_node(slurm.all_nodes(world), world.node)
    except slurm.NoAnswer as error:
        ledger.record(world, "no_answer", why=str(error))
        return {}
    if node is None or not node.drained or node.ours or _slurms_own(node):
        return {}
    if not node.flags & REBOOTS:
        return {}  # nobody drops it; when it is gone, somebody has taken it away
    return {"reason": node.reason, "user": node.user, "since": node.since}


def _slurms_own(node: "Node") -> bool:
    return not node.reason or node.reason.lower().startswith(("reboot asap", "not responding", "node unexpectedly rebooted"))


def _bring_back_a_foreign_drain(world: "World", booted: "dict[str, object]") -> None:
    """It was there when the node came up and is gone right after: set it again, once, in the same words."""
    foreign = booted.get("foreign")
    if not isinstance(foreign, dict) or not foreign:
        return
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    late = time.time() - files.number(booted.get("at")) > FOREIGN_S
    if node is None or (node.untouchable and not late):
        return
    booted["foreign"] = {}
    files.write_json(world.path(BOOTED), booted)
    if not node.drained and not late and not any(plan.mode == "drain" for plan in engine.plans(world, "all")):
        ledger.record(world, "would_restore", reason=foreign.get("reason"))  # observe mode touches nothing
    elif not node.drained and not late:
        words = {"reason": str(foreign.get("reason", "drained before the reboot")), "user": str(foreign.get("user", ""))}
        drain.give_back(world, words)
