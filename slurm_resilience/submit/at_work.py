"""Is a job of this run in Slurm already?  A second one would be turned away once it starts, after a wait in the queue.

What counts is what Slurm says of the jobs that the run folder names.  A job that is over, that Slurm has forgotten, or of which
nobody can tell, is no obstacle: the supervisor of the second one looks again when it starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience.errors import ConfigError, SlurmError
from slurm_resilience.runtime.address import SUPERVISOR_FILE
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState
from slurm_resilience.submit.job import FILE_NAME

_OVER = ("complete", "failed", "cancelled")  # its supervisor has done its work: what still runs of the job is its end
_ENDS = ("afterany", "afterok", "afternotok")  # of a dependency: it begins when the other has ended


def refuse_a_second(client: SlurmClient, run_dir: Path, *, dependency: str = "", name: str = "") -> None:
    """Raise :class:`ConfigError` when a job of the run waits or runs, unless ``dependency`` has the new one wait for its end.

    ``name``: that of the new job, which "singleton" goes by.
    """
    record = next((each for each in at_work(client, run_dir) if not _behind(each, dependency, name)), None)
    if record is None:
        return
    where = f" on {','.join(record.nodes)}" if record.nodes else f", Reason={record.reason}" if record.reason else ""
    raise ConfigError(
        f"The run in {run_dir} has a job in Slurm already, {record.job_id}, and a run is one job at a time",
        evidence=f"it is {record.state}{where}",
        remedy=f"leave it; or give it other nodes with `slurm-resilience requeue {record.job_id}`; or "
        f"`scancel {record.job_id}` and submit again; or have the new one wait for its end with "
        f"--dependency=afterany:{record.job_id}",
    )


def at_work(client: SlurmClient, run_dir: Path) -> list[JobRecord]:
    """The jobs of this run that wait or run, the one that works on it first; none where nobody can tell."""
    submitted, supervised = _document(run_dir / FILE_NAME), _document(run_dir / SUPERVISOR_FILE)
    script = str(submitted.get("script") or "")
    over = _document(run_dir / "state.json").get("state") in _OVER
    found = []
    # Job ids come round again: the record must be of that script, or of that very run of the job, or of its requeue.
    record = _ask(client, supervised.get("job_id"))
    its_own = record is not None and record.restarts in _restarts(record, supervised.get("restart_count"))
    if record is not None and its_own and not (over and record.state.running):
        found.append(record)
    if submitted.get("cluster") == "slurm" and script and submitted.get("job_id") != supervised.get("job_id"):
        record = _ask(client, submitted.get("job_id"))
        if record is not None and record.command.endswith(f"/{script}"):
            found.append(record)
    return found


def _restarts(record: JobRecord, of_supervisor: Any) -> tuple[int, ...]:
    """The restart counts with which the job of a supervisor is still that job: its own, and, in the queue, the next."""
    if not isinstance(of_supervisor, int):
        return ()
    return (of_supervisor,) if record.state.running else (of_supervisor, of_supervisor + 1)


def _ask(client: SlurmClient, job_id: Any) -> JobRecord | None:
    """The record of a job that is not over."""
    if not re.fullmatch(r"\d+(_\d+|\+\d+)?", str(job_id)):
        return None
    try:
        record = client.job(str(job_id))
    except SlurmError:
        return None
    ending = record.state is JobState.COMPLETING and not record.requeued
    return None if record.state.ended or ending else record


def _behind(record: JobRecord, dependency: str, name: str) -> bool:
    """A job with this dependency begins when that one has ended."""
    for word in re.split(r"[,?]", dependency):
        kind, *jobs = word.strip().split(":")
        if kind == "singleton" and record.name == name:
            return True
        if kind in _ENDS and {job.partition("+")[0] for job in jobs} & {record.job_id, record.raw_job_id}:
            return True
    return False


def _document(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
