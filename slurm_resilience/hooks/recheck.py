"""What an earlier run could not finish: epilogs that were killed, verdicts that no controller took."""

import time

from . import engine, files, ledger, marks, settle
from .checks import FAIL, UNKNOWN, Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

PENDING_S = 86400.0


def unfinished_epilogs(world: "World") -> None:
    """The checks of each epilog that was killed in the middle are made now, before anything else may run here."""
    for mark in marks.unfinished(world):
        job = str(mark["job"])
        if world.exhausted(2.0):
            return  # the next look goes on
        ledger.record(world, "epilog_made_up", ended_job=job, same_boot=mark.get("boot") == world.boot)
        if mark.get("boot") == world.boot:
            from .world import Job

            ended = Job({"SLURM_JOB_ID": job, "SLURM_JOB_UID": str(mark.get("uid", ""))})
            chosen = engine.plans(world, "epilog")
            results = engine.run(world, chosen, ended)
            settle.settle(world, chosen, results, engine.remember(world, results))
        marks.end(world, job)


def pending_verdict(world: "World", results: "list[Result]") -> None:
    """A drain that could not be set is set now, if the check still fails; a verdict of another boot is looked at anew."""
    from . import drain

    entry = drain.pending(world)
    if not entry:
        return
    if not any(plan.name == entry.get("check") and plan.mode == "drain" for plan in engine.plans(world, "all")):
        files.remove(world.path(drain.PENDING))
        ledger.record(world, "pending_dropped", check=entry.get("check"), why="the check is not to drain any more")
        return
    now = [result for result in results if result.check == entry.get("check")]
    if not now and entry.get("boot") == world.boot and time.time() - files.number(entry.get("at")) < PENDING_S:
        try:
            now = [Result.from_dict(entry)]
        except ValueError:
            now = []
    if now and now[0].status == UNKNOWN:
        return  # no news
    if now and now[0].status == FAIL and not drain.own(world):
        # The verdict is kept until it is acted on: whoever kills us now does not lose it
        if drain.drain(world, now[0]).kind in drain.KEPT:
            return
    elif now and now[0].status != FAIL:
        ledger.record(world, "pending_dropped", check=entry.get("check"), why=f"the check is {now[0].status} now")
    files.remove(world.path(drain.PENDING))
