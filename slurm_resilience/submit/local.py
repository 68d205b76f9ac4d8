"""The same run without Slurm: the same script, started as a process of this machine, on pretend nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from typing import Any

from slurm_resilience._clock import boot_id
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import SubmitError
from slurm_resilience.slurm.environment import submission_environment
from slurm_resilience.submit.folders import check_folder, new_run_dir
from slurm_resilience.submit.handles import process_started
from slurm_resilience.submit.job import ResilientJob
from slurm_resilience.submit.prepare import Work, prepare, settings_of

_HEADER = "#!/bin/bash\n# Started as a process, not by Slurm."


def start_local(
    folder: str | os.PathLike[str],
    name: str,
    work: Work,
    config: ResilienceConfig,
    *,
    python: str | None = None,
    lead_s: int = 0,
) -> ResilientJob[Any]:
    """Start the run as a process group of its own, which outlives this process.  Raises as submitting to Slurm would."""
    if shutil.which("bash") is None:
        raise SubmitError(
            "There is no bash here", evidence="it is not on PATH", remedy="install bash: the run's script needs it"
        )
    run_dir = new_run_dir(check_folder(folder, shared=False), name)
    interpreter = python or sys.executable
    settings = settings_of(run_dir, work, python=interpreter, lead_s=lead_s, more_options=("--local", str(config.nodes[1])))
    try:
        prepared = prepare(run_dir, work, config, header=_HEADER, settings=settings)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    log = run_dir / "logs" / "job-local.out"
    with open(log, "ab") as out:
        child = subprocess.Popen(
            ["bash", os.fspath(prepared.script)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=submission_environment(),
        )
    job = ResilientJob[Any](
        run_dir,
        {
            "cluster": "local",
            "job_id": "local",
            "run_id": prepared.run_id,
            "submitted_at": time.time(),
            "pid": child.pid,
            "pid_started": process_started(child.pid),
            "boot_id": boot_id(),
        },
    )
    child.returncode = 0  # its handle waits for it; without this Popen would warn when it is forgotten
    job.save_description()
    return job
