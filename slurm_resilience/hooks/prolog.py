"""Before a job: is this node known to be well?  Without a Slurm command while it is, and never with an exit code of our own."""

from . import checks, engine, ledger, recheck, settle, station

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World


def run(world: "World") -> None:
    """Use the periodic check's verdict while it is fresh, else look; act on what fails; make up for a killed epilog."""
    station.attempt(world, "killed epilogs", lambda: recheck.unfinished_epilogs(world))
    chosen = engine.plans(world, "prolog")
    told = engine.verdict(world)
    fresh_s = world.number("verdict", "fresh_s", 600)
    stale = [plan for plan in chosen if not engine.fresh(told.get(plan.name, {}), fresh_s)]
    if stale:
        results = engine.run(world, stale)
        told = engine.remember(world, results)
    results = []
    for plan in chosen:
        entry = told.get(plan.name)
        if entry:
            results.append(checks.Result.from_dict(entry))
    outcome = settle.settle(world, chosen, [result for result in results if result.status != checks.OK], told)
    if outcome is not None and outcome.kind == "granted" and world.job.id:
        _send_elsewhere(world, outcome.reason)


def _send_elsewhere(world: "World", reason: str) -> None:
    """The job that was about to start here goes back into the queue, not held; a job that may not be requeued runs."""
    from . import slurm

    try:
        slurm.call(world, "scontrol", "requeue", world.job.id)
        ledger.record(world, "job_sent_elsewhere", reason=reason)
    except (slurm.NoAnswer, slurm.Refused) as error:
        ledger.record(world, "job_stays", why=str(error))
