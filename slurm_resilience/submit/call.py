"""What every rank of a submitted function runs: ``python -m slurm_resilience.submit.call RUN_DIR/call``.

Loads the function, makes the ``Run``, calls ``function(run, *args, **kwargs)``; rank 0 keeps what it returns, if the run
really came to its end.  A run that was asked to stop has no result yet: another attempt goes on.  Functions that take
no ``Run`` are called without one (:mod:`slurm_resilience.submit.classic`).
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.payload import CallFolder, Result


def main(argv: list[str]) -> None:
    """Call the function in the folder ``argv[0]`` as this rank.  Its exceptions pass through, and fail the attempt."""
    if len(argv) != 1:
        raise ConfigError("usage: python -m slurm_resilience.submit.call RUN_DIR/call", evidence=f"arguments: {argv}")
    folder = CallFolder(argv[0])
    folder.extend_path()
    try:
        call = folder.read()
        if not call.with_run:
            from slurm_resilience.submit.classic import run_classic

            run_classic(folder, call)
            return
        from slurm_resilience.training import Run

        run = Run.current()
        value = call.function(run, *call.args, **call.kwargs)
        _finish(run, folder, value)
    except Exception as error:
        folder.write_error(*_who(), error, traceback.format_exc())
        raise


def _who() -> tuple[int, int]:
    """Attempt and rank, from the environment: an error may come before there is a Run."""
    return int(os.environ.get("RESILIENCE_ATTEMPT") or 0), int(os.environ.get("RANK") or 0)


def _finish(run: Any, folder: CallFolder, value: Any) -> None:
    if run.stopping or run.outcome == "stopped":
        return
    if not run.outcome:
        _without_steps(run)
    if run.rank != 0 or (run.outcome == "already_complete" and folder.has_result()):
        return
    folder.write_result(Result(run.attempt, value))


def _without_steps(run: Any) -> None:
    """The function returned and never came to the end of ``run.steps()``.

    One that never used the run's loop is finished when it returns.  One that did and left it early must say so with
    ``run.finish()``: otherwise an exception that its own code swallowed would pass for the end.
    """
    from slurm_resilience.progress.contract import RankContract
    from slurm_resilience.progress.facts import FactSender
    from slurm_resilience.progress.page import PageWriter

    if _resumed(run):
        raise ConfigError(
            f"The function returned at step {run.step}, before its loop over run.steps() had come to its end",
            evidence="neither the last step nor run.finish() was reached",
            remedy="call run.finish() where the training is meant to end early",
        )
    contract = RankContract.from_environment()
    if contract is not None:
        FactSender(contract.facts, attempt=contract.attempt, rank=run.rank).send("finished", step=0, outcome="completed")
        PageWriter(contract.page).done()


def _resumed(run: Any) -> bool:
    try:
        run.should_stop(agree=False)
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
