"""The function called here and now, in this process: for a debugger, with no supervisor and no second attempt."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import EXIT_CODE_OF, Cause, ConfigError, ExitCode
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.submit.folders import check_folder, new_run_dir
from slurm_resilience.submit.job import ResilientJob
from slurm_resilience.submit.payload import CallFolder, Result
from slurm_resilience.submit.prepare import Work, fill


def run_here(folder: str | os.PathLike[str], name: str, work: Work, config: ResilienceConfig) -> ResilientJob[Any]:
    """Call it, and return its job, which is over.  What it raises is the job's ``exception()``."""
    if work.function is None:
        raise ConfigError("cluster='debug' calls functions", remedy="run a command by hand, or with cluster='local'")
    run_dir = new_run_dir(check_folder(folder, shared=False), name)
    run_id = fill(run_dir, work, config, command=("debug", name))
    run, call = RunFolder(run_dir), CallFolder(run_dir / "call")
    description = {"cluster": "debug", "job_id": "debug", "run_id": run_id, "submitted_at": time.time()}
    job = ResilientJob[Any](run_dir, description)
    job.save_description()
    run.write_status(RunStatus("running"))
    try:
        with _inside(run_dir):
            value = work.function(*_run_object(work, run_dir, config), *work.args, **work.kwargs)
        call.write_result(Result(0, value))
        run.write_status(RunStatus("complete", "", "the function returned", int(ExitCode.OK)))
    except Exception as error:  # noqa: BLE001, the user's function may raise anything
        call.write_error(0, 0, error, traceback.format_exc())
        cause = Cause.APP_ERROR
        run.write_status(RunStatus("failed", str(cause), f"{type(error).__name__}: {error}", int(EXIT_CODE_OF[cause])))
    return job


def _run_object(work: Work, run_dir: os.PathLike[str], config: ResilienceConfig) -> tuple[Any, ...]:
    if not work.with_run:
        return ()
    from slurm_resilience.training import Run

    settings = config.model_dump(mode="json", include={"seed", "global_batch", "micro_batch", "checkpoint"})
    return (Run(folder=run_dir, **{name: value for name, value in settings.items() if value is not None}),)


@contextmanager
def _inside(run_dir: os.PathLike[str]) -> Iterator[None]:
    """The run folder in the environment, as ranks have it."""
    before = os.environ.get("RESILIENCE_RUN_DIR")
    os.environ["RESILIENCE_RUN_DIR"] = os.fspath(run_dir)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RESILIENCE_RUN_DIR"]
        else:
            os.environ["RESILIENCE_RUN_DIR"] = before
