"""The run goes on in a new job where Slurm does not let this one come back: the same script, the same folder, another id.

A job cannot be requeued where it, or the site, forbids it and does not let its user allow it.  The new job begins when this one
has ended (afterany), so that no two work on the run.  Whoever waits for the run finds the new id in its folder.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json, write_json_atomic
from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.environment import submission_environment
from slurm_resilience.slurm.mark import Marks, with_word
from slurm_resilience.slurm.nodeset import fold
from slurm_resilience.slurm.records import JobRecord

# Set by the shipped script: Slurm's copy of itself, for a run that was not prepared by `submit`.
SCRIPT_VARIABLE = "RESILIENCE_BATCH_SCRIPT"
JOB_FILE = "job.json"


def resubmit(
    client: SlurmClient,
    record: JobRecord,
    run_dir: Path,
    *,
    nodes: tuple[int, int] | None = None,
    exclude: tuple[str, ...] = (),
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Queue the run's script again, to start when job ``record`` is over; the new job's id.

    What was asked of Slurm outside of the script (on sbatch's command line) is asked again as far as the job's record shows it.
    Raises :class:`SlurmError` when there is no script or Slurm refuses.
    """
    script = _script(run_dir, environment)
    asked = {
        "dependency": f"afterany:{record.job_id}",
        "partition": record.partition,
        "account": _said(record, "Account"),
        "qos": record.qos,
        "job-name": record.name,
        "comment": with_word(Marks.read(record.comment).words),
        "time": record.fields.get("TimeLimit", ""),
        "nodes": f"{nodes[0]}-{nodes[1]}" if nodes else "",
        "exclude": fold([*record.excluded, *(name for name in exclude if name not in record.excluded)]),
        "chdir": record.work_dir,
        "reservation": _said(record, "Reservation"),
        "array": record.fields.get("ArrayTaskId", ""),
    }
    options = [f"--{name}={value}" for name, value in asked.items() if value]
    kept = submission_environment(environment, decided=asked.keys())
    job_id = client.submit(str(script), options, environment={**kept, "RUN_DIR": str(run_dir)})
    if asked["array"]:
        job_id = f"{job_id}_{asked['array']}"
    _tell_those_who_wait(run_dir, job_id, script)
    return job_id


def _script(run_dir: Path, environment: Mapping[str, str]) -> Path:
    """The script that is queued again, where it stays: Slurm's own copy goes with the job."""
    for place in (run_dir / "call" / "submission.sh", run_dir.parent / "submission.sh"):
        if place.is_file() and (place.parent != run_dir.parent or re.fullmatch(r"task-\d+", run_dir.name)):
            return place
    mine = environment.get(SCRIPT_VARIABLE, "")
    if not os.path.isfile(mine):
        raise SlurmError(
            "The job's script is not known, so the run cannot go on in a new job",
            evidence=f"it was not made by `slurm-resilience submit`, and {SCRIPT_VARIABLE} does not name it",
            remedy=f"export {SCRIPT_VARIABLE}=$0 in the script, as the shipped template does",
        )
    copy = run_dir / "resubmission.sh"
    shutil.copyfile(mine, copy)
    copy.chmod(0o700)
    return copy


def _tell_those_who_wait(run_dir: Path, job_id: str, script: Path) -> None:
    before: Any = read_json(run_dir / JOB_FILE)
    if isinstance(before, dict):
        earlier = [*before.get("earlier_job_ids", []), before.get("job_id")]
        moved = {"job_id": job_id, "submitted_at": time.time(), "script": f"{script.parent.parent.name}/call/{script.name}"}
        if script.parent == run_dir.parent:
            moved["script"] = f"{script.parent.name}/{script.name}"
        write_json_atomic(run_dir / JOB_FILE, {**before, **moved, "earlier_job_ids": earlier})


def _said(record: JobRecord, name: str) -> str:
    value = record.fields.get(name, "")
    return "" if value in ("(null)", "None", "N/A") else value
