"""Accelerate: the loop is the script's own, state goes through ``accelerator.save_state`` and ``load_state``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_resilience.integrations.file_run import ENDLESS, FileRun

_STEP = "resilience_step"


class AccelerateRun:
    """A resilient run of a script that uses Accelerate; make it before the ``Accelerator``, so that the ranks are joined.

    ``run.prepared(accelerator)`` after ``accelerator.prepare(…)`` restores, then ``for step in run.steps(total)``.  What
    ``save_state`` keeps is kept: prepared models, optimizers, schedulers, what was registered, RNG of every rank.  The
    place in the data is the script's: begin at ``step`` (``accelerator.skip_first_batches``).
    """

    def __init__(self, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        self._accelerator: Any = None
        self._run = FileRun(self._write, folder=folder, **settings)
        self._run.init_process_group()

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._run.step

    @property
    def stopping(self) -> bool:
        """The run was asked to stop and has saved; the script should end."""
        return self._run.stopping

    def prepared(self, accelerator: Any) -> int:
        """Restore all that the accelerator has prepared; the step to go on from, 0 for a fresh start.  All ranks must come."""
        remedy = "on CPUs make it Accelerator(cpu=True); otherwise make it after the AccelerateRun, which joins the ranks"
        self._run.require_world("Accelerate", accelerator.num_processes, remedy)
        self._accelerator = accelerator
        newest = self._run.newest()
        step = 0
        if newest is not None:
            accelerator.load_state(str(newest))
            step = int((newest / _STEP).read_text(encoding="ascii"))
        self._run.start(step)
        return step

    def steps(self, total: int = ENDLESS) -> Iterator[int]:
        """The index of each step that is still to be taken; see ``Run.steps``."""
        return self._run.steps(total)

    def report(self, **values: Any) -> None:
        """What this step gave; see ``Run.report``."""
        self._run.report(**values)

    def finish(self) -> None:
        """The work is done although steps are left."""
        self._run.finish()

    def _write(self, folder: Path) -> None:
        self._accelerator.save_state(str(folder), safe_serialization=True)
        if self._run.rank == 0:
            (folder / _STEP).write_text(str(self._run.step), encoding="ascii")
