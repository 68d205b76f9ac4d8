"""A run whose framework writes and reads its own checkpoints: heartbeat, agreement, committed files, stops, requeue.

What is not here, compared with ``Run``: nothing is known of the state, so it is not resharded and not verified beyond its
bytes; what another number of ranks does to the order of the data is the framework's business.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_resilience.errors import ConfigError
from slurm_resilience.integrations.file_saver import FileReader, FileSaver, Write
from slurm_resilience.integrations.step_batches import StepBatches
from slurm_resilience.progress.page import Phase
from slurm_resilience.training.crash import CrashReporter
from slurm_resilience.training.data import Batches, make_batches
from slurm_resilience.training.keeping import Keeping
from slurm_resilience.training.metrics import MetricsFile
from slurm_resilience.training.own_time import OwnTime
from slurm_resilience.training.sections import section
from slurm_resilience.training.signals import SignalFlags
from slurm_resilience.training.steps import Stepper

# A framework that does not know how long it will train: nothing ends by the count.
ENDLESS = 1 << 62

log = logging.getLogger(__name__)


class FileRun(Keeping):
    """One rank's hold on a resilient run of a framework.

    ``write(folder)`` is called on every rank to write a checkpoint, and must leave plain files there.  ``settings`` are those
    of ``Run``.  The order of calls: :meth:`newest`, let the framework load it, :meth:`start`, then :meth:`steps`, or
    :meth:`advance` after each optimizer step and :meth:`finish` at the end.
    """

    def __init__(self, write: Write, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__(folder, settings)
        self._write = write
        self._reader: FileReader | None = None
        self._stepper: Stepper | None = None
        self._loop: Iterator[int] | None = None
        self._began = time.monotonic()
        self._newest: Any = None
        self._samples: Batches | None = None
        self._flags = SignalFlags()
        if not self._flags.install():
            log.warning("the run was made outside the main thread: signals are not watched")
        self._crashes = CrashReporter(lambda kind, **fields: self._link.send(kind, step=self.step, **fields))
        self._crashes.install()

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._stepper.step if self._stepper else 0

    @property
    def stopping(self) -> bool:
        """The run was asked to stop, has saved what could be saved, and its script should end with exit code 0."""
        return self._stepper is not None and self._stepper.stopping

    @property
    def started(self) -> bool:
        return self._stepper is not None

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the other ranks, before the framework does.  All ranks must come."""
        self._world.init_process_group(backend, timeout_s)

    def require_world(self, framework: str, ranks: int, remedy: str) -> None:
        """The framework trains on all ranks together.  Raises :class:`ConfigError` when each would train for itself."""
        if ranks != self.world_size:
            raise ConfigError(
                f"{framework} sees {ranks} rank{'s' if ranks != 1 else ''}, and there are {self.world_size}",
                evidence="each of them would train a model of its own, and all would write the same files",
                remedy=remedy,
            )

    def newest(self) -> Path | None:
        """The files of the newest checkpoint that is whole; None for a fresh start.  All ranks must come.

        Raises :class:`NoValidCheckpoint` when there are checkpoints and none is whole.
        """
        if self._reader is None:
            self._link.enter(Phase.RESUME)
            self._world.join()
            self._open()
            self._store = self._open_store()
            by = f"attempt {self._attempt} of {self._run_id}, {self.world_size} ranks: every byte, by its digest"
            self._reader = FileReader(world=self._world, link=self._link, store=self._store, by=by)
            self._newest = self._reader.newest()
        return None if self._newest is None else Path(self._newest[1])

    def start(self, step: int) -> None:
        """The framework stands at ``step`` completed optimizer steps, with or without a checkpoint.  All ranks must come.

        Raises :class:`ConfigError` when that is not the step of the checkpoint that it was given.
        """
        self.newest()
        assert self._reader is not None
        mesh = self.mesh
        saver = FileSaver(
            world=self._world, link=self._link, store=self._store, write=self._write, mesh=mesh, pace=self._pace(),
            extra=lambda step: {} if self._samples is None else {"data": self._samples.state(step)},
        )  # fmt: skip
        if self._newest is None:
            self._link.send("started_fresh")
        else:
            entry = self._newest[0]
            if entry.step != step:
                raise ConfigError(
                    f"The framework stands at step {step}, the checkpoint that it was given is of step {entry.step}",
                    evidence=str(self._newest[1]),
                    remedy="let it load the folder that newest() names, whole, before start()",
                )
            self._reader.accept(entry)
            saver.begun_step = saver.saved_step = step
            seconds = round(time.monotonic() - self._began, 6)
            told = {"step": step, "checkpoint": entry.name, "seconds": seconds, "world": self.world_size}
            self._link.send("resumed", **told, rng="framework", tier="shared")
        self._stepper = Stepper(
            step=step,
            attempt=self._attempt,
            world=self._world,
            link=self._link,
            saver=saver,
            own_time=OwnTime(self._link, self._world),
            metrics=MetricsFile(self._folder) if self.rank == 0 else None,
            settings=self._settings,
            flags=self._flags,
            obey_signals=not self.supervised,
        )
        self._link.beat(step)
        self._link.enter(Phase.USER)

    def batch_sampler(
        self, num_samples: int, *, shuffle: bool = True, seed: int | None = None, dataset: str = ""
    ) -> StepBatches:
        """For ``DataLoader(batch_sampler=…)``: this rank's micro-batches, the same global batch at each step on any world.

        The last, smaller batch of an epoch is left out.  ``dataset`` is any text that identifies the data.  Raises
        :class:`ConfigError` when the checkpoint is about other data, or another batch.
        """
        made = make_batches(
            num_samples,
            self.global_batch,
            self.micro_batch,
            rank=self.dp_rank,
            ranks=self.dp_ranks,
            seed=self.seed if seed is None else seed,
            shuffle=shuffle,
            drop_last=True,
            dataset=dataset,
            deal="even",
            reduce="mean",
        )
        self.newest()
        if self._newest is not None:
            entry = self._newest[0]
            made.seek(entry.step, self._store.manifest(entry).extra.get("data"))
        self._samples = made
        return StepBatches(
            made, lambda: self.step if self.started else 0 if self._newest is None else int(self._newest[0].step)
        )

    # -- the loop ---------------------------------------------------------------------------------------------

    def steps(self, total: int = ENDLESS) -> Iterator[int]:
        """The index of each step that is still to be taken; see ``Run.steps``."""
        return self._ready().steps(total)

    def advance(self, **values: Any) -> bool:
        """One more optimizer step is done, with these figures; whether to go on.  All ranks call it alike.

        For frameworks that own the loop.  What is due is done in here: beat, metrics, checkpoint, the last save.
        """
        stepper = self._ready()
        if self._loop is None:
            self._loop = stepper.steps(ENDLESS)
            next(self._loop)
        stepper.note_update()
        stepper.report(values)
        return next(self._loop, None) is not None

    def report(self, **values: Any) -> None:
        """What this step gave; see ``Run.report``."""
        self._ready().report(values)

    def amend(self, **values: Any) -> None:
        """What the framework tells of the last completed step only after :meth:`advance`."""
        self._ready().amend(values)

    def checkpoint(self) -> None:
        """Ask for a checkpoint after this step.  All ranks call it alike."""
        self._ready().ask_save()

    def finish(self) -> None:
        """The framework has reached the end of its work: last checkpoint, then the end.  All ranks must come."""
        stepper = self._ready()
        if not stepper.stopping:
            stepper.finish()

    def section(self, name: str) -> Any:
        """Around long work between steps, such as an evaluation: it has a limit of its own before it counts as a hang."""
        return section(self._link, name, "auto")

    def beat(self) -> None:
        """Alive: for long work inside one step."""
        self._link.beat(self.step)

    def close(self) -> None:
        """Put back the signal handlers and the exception hook of before."""
        if self._loop is not None:
            self._loop.close()  # type: ignore[attr-defined]
        if self._stepper is not None:
            self._stepper.close()
        self._flags.restore()
        self._crashes.restore()

    def _ready(self) -> Stepper:
        if self._stepper is None:
            raise ConfigError("The run has not been started", remedy="call newest(), load what it names, then start(step)")
        return self._stepper
