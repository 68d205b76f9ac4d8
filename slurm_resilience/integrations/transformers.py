"""Transformers' ``Trainer``: a callback, and where to resume from.

    resilience = Resilience(checkpoint={"every_steps": 500})
    trainer = Trainer(model=…, args=TrainingArguments(save_strategy="no", …), callbacks=[resilience])
    trainer.train(resume_from_checkpoint=resilience.attach(trainer))

The trainer's own checkpoint (model, optimizer, scheduler, RNG of every rank, its state) is committed by us.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slurm_resilience.errors import ConfigError
from slurm_resilience.integrations.file_run import FileRun


class Resilience(TrainerCallback):
    """Heartbeat, checkpoints, stops and the way back for a Transformers trainer.  ``settings`` are those of ``Run``."""

    def __init__(self, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        self._trainer: Trainer | None = None
        self._run = FileRun(self._write, folder=folder, **settings)
        self._run.init_process_group()

    def scratch(self) -> str:
        """For ``TrainingArguments(output_dir=…)``: a folder of this attempt in the run's own, where checkpoints begin."""
        return str(self._run.folder / "trainer")

    def attach(self, trainer: Trainer) -> str | None:
        """For ``trainer.train(resume_from_checkpoint=…)``: the newest whole checkpoint, None for a fresh start.

        Raises NoValidCheckpoint when there are checkpoints and none is whole, ConfigError when the trainer saves by itself.
        """
        if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no":
            raise ConfigError(
                "The trainer takes checkpoints of its own beside ours",
                evidence=f"save_strategy is {trainer.args.save_strategy}",
                remedy='TrainingArguments(save_strategy="no"); how often we save is Resilience(checkpoint={"every_steps": …})',
            )
        remedy = "on CPUs say TrainingArguments(use_cpu=True); otherwise make the arguments after the callback"
        self._run.require_world("Transformers", trainer.args.world_size, remedy)
        self._trainer = trainer
        newest = self._run.newest()
        return None if newest is None else str(newest)

    # -- the trainer calls these --------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Everything is restored: the run begins to count."""
        if self._trainer is None:
            raise ConfigError(
                "The callback has no trainer", remedy="trainer.train(resume_from_checkpoint=resilience.attach(trainer))"
            )
        self._run.start(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What the trainer tells of the step that was just completed goes into our metrics."""
        logs = kwargs.get("logs") or {}
        wanted = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
        told = {ours: logs[name] for name, ours in wanted.items() if name in logs}
        if told and self._run.started and state.global_step == self._run.step:
            self._run.amend(**told)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After an optimizer step: all that is due."""
        if not self._run.advance():
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation is alive."""
        if self._run.started:
            self._run.beat()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The end of the work, or of this attempt."""
        self._run.finish()
        self._run.close()

    def _write(self, folder: Path) -> None:
        """The trainer writes where it always does; what it has written is moved to us."""
        assert self._trainer is not None
        trainer: Any = self._trainer
        written = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.process_index == 0:
            for path in sorted(written.iterdir()):
                shutil.move(path, folder / path.name)
            written.rmdir()
