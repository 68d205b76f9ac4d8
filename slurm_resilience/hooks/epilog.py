"""After a job: has it left the node well?  The verdict is kept before it is acted on: a killed slurmd cannot lose it."""

from . import engine, ledger, marks, settle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World


def run(world: "World") -> None:
    """Check, keep, act.  Exit codes of the job are written down only when they say something: 0:0 is also a cancelled job."""
    if world.job.id:
        try:
            marks.begin(world)
        except OSError as error:  # a full disk must not keep us from looking
            ledger.record(world, "own_error", error=f"cannot mark the epilog as begun: {error}")
    if world.job.status:
        ledger.record(world, "job_ended", status=world.job.status, uid=world.job.uid, nodes=world.job.nodes)
    chosen = engine.plans(world, "epilog")
    results = engine.run(world, chosen)
    told = engine.remember(world, results)
    settle.settle(world, chosen, results, told)
    if world.job.id:
        marks.end(world, world.job.id)
