"""The jobs on a node that had to go at once: back into the queue instead of failing one after the other, where configured.

``drain_now: {requeue: off | resilient | all}``; resilient ones are those whose comment begins with that word.  Held by
nobody, and only what Slurm itself allows: a job that may not be requeued stays.
"""

from . import ledger, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

MOST_JOBS = 100


def requeue_jobs(world: "World") -> None:
    """Requeue what runs here.  Each job's outcome is recorded; nothing is raised."""
    whose = world.text("drain_now", "requeue", "off")
    if whose not in ("resilient", "all"):
        return
    try:
        jobs = running(world)
    except (slurm.NoAnswer, slurm.Refused) as error:
        ledger.record(world, "jobs_stay", why=str(error))
        return
    for job in [job for job in jobs if job != world.job.id][:MOST_JOBS]:
        if world.exhausted(1.0):
            ledger.record(world, "jobs_stay", why="no time left", from_job=job)
            return
        try:
            if whose == "resilient" and not _resilient(world, job):
                continue
            slurm.call(world, "scontrol", "requeue", job)
            ledger.record(world, "job_requeued", requeued_job=job)
        except (slurm.NoAnswer, slurm.Refused) as error:
            ledger.record(world, "job_stays", stays=job, why=str(error))


def running(world: "World") -> "list[str]":
    """The jobs on this node: numbers only, so that no free text can pose as another job."""
    out = slurm.call(world, "squeue", "-h", "-w", world.node, "-t", "RUNNING,SUSPENDED", "-o", "%A")
    return [word for word in out.split() if word.isdigit()]


def _resilient(world: "World", job: str) -> bool:
    """Does the job's comment begin with that word?  Whatever else is in it can concern this job only."""
    out = slurm.call(world, "squeue", "-h", "-j", job, "-O", "Comment:20")
    return out.split("\n")[0].split(" ")[0] == "resilient"
