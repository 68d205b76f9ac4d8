"""What is true of a run where Slurm's record of its job says more than the run's own events?

Events end in mid-sentence when batch script and supervisor are killed, or their node is lost.  Then the record of the job is
the better witness: over, back in the queue, running again, running with nobody to look after it, or not known any more.
"""

from __future__ import annotations

from slurm_resilience.observe.standing import Standing
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState

_AGAIN = "submit again with the same --run-dir, and it goes on from its newest checkpoint"


def look_at_slurm(standing: Standing, record: JobRecord | None, *, forgotten: bool = False) -> None:
    """Correct ``doing`` and ``because`` of a run that has not ended by its own word.

    ``record``: of its job, None where Slurm was not asked or did not answer; ``forgotten``: it answered that it has no such
    job.  Call it after :func:`look_for_supervisor`.
    """
    if standing.over:
        return
    if record is None:
        if forgotten and standing.doing in ("queued", "unsupervised"):
            _left_alone(
                standing, f"Slurm does not know its job {standing.job_id} (any more, or it is another cluster's)", _AGAIN
            )
        return
    why = f" ({record.reason})" if record.reason else ""
    before = _before(standing)
    newer = record.restarts > standing.restart or not f"{standing.job_id}_".startswith(f"{record.job_id}_")
    if record.state.ended:
        _left_alone(standing, f"Slurm has its job as {record.state}{why} now", _AGAIN)
    elif record.state is JobState.COMPLETING and not record.requeued and standing.silent_s is not None:
        _change(standing, "stopping", f"Slurm is ending the job{why}, its supervisor left no word of that ({before})")
    elif newer and record.state.waiting:
        if standing.doing != "queued":
            _change(standing, "queued", f"Slurm has it in its queue, its last supervisor left no word of an end ({before})")
        standing.job_id, standing.restart = record.job_id, record.restarts
    elif newer and record.state.running:
        _change(standing, "starting", "Slurm has started it again, its supervisor has not said anything yet")
        standing.job_id, standing.restart = record.job_id, record.restarts
    elif record.state.running and standing.doing == "unsupervised":
        job = record.job_id
        remedy = f"`slurm-resilience requeue {job}` starts it again; or `scancel {job}`, and {_AGAIN}"
        _left_alone(standing, f"its job {job} still runs in Slurm", remedy)


def _left_alone(standing: Standing, found: str, remedy: str) -> None:
    if standing.doing == "queued":
        said = f"it was queued, and {found}"
    elif standing.doing == "unsupervised":
        said = f"{standing.because.rpartition('; ')[0]}; {found}"  # in place of the general advice
    else:
        said = f"{found}, and its supervisor left no word of an end ({_before(standing)})"
    _change(standing, "unsupervised", f"{said}; {remedy}")


def _before(standing: Standing) -> str:
    return f"{standing.doing}, {standing.because.partition('; no sign of')[0]}"


def _change(standing: Standing, doing: str, because: str) -> None:
    if standing.doing != doing:
        standing.since = None  # nobody has said when
    standing.doing, standing.because = doing, because
