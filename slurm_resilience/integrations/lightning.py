"""Lightning: a callback that takes the place of its Slurm auto-requeue.

    resilience = Resilience(global_batch=64, micro_batch=16)
    loader = DataLoader(data, batch_sampler=resilience.batches(len(data)))
    trainer = Trainer(callbacks=[resilience], **resilience.trainer_arguments())
    trainer.fit(model, loader, ckpt_path=resilience.newest())

Lightning's own checkpoint, with all that its loops, callbacks and loaders keep, is committed by us; a save comes only
between optimizer steps, decided by all ranks together.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer

from slurm_resilience.errors import ConfigError
from slurm_resilience.integrations.file_run import FileRun
from slurm_resilience.integrations.step_batches import StepBatches

_FILE = "lightning.ckpt"


class Resilience(Callback):
    """Heartbeat, checkpoints, stops and the way back for a Lightning trainer.

    ``global_batch`` and ``micro_batch`` are samples per optimizer step and per forward pass of one rank; with them
    :meth:`trainer_arguments` keeps the batch constant on any number of ranks.  Other ``settings`` are those of ``Run``.
    """

    def __init__(self, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._run = FileRun(self._write, folder=folder, **settings)
        self._sections: list[Any] = []

    def newest(self) -> str | None:
        """For ``trainer.fit(…, ckpt_path=…)``: the newest checkpoint that is whole, None for a fresh start.

        Joins the ranks.  Raises NoValidCheckpoint when there are checkpoints and none is whole.
        """
        self._run.init_process_group()
        folder = self._run.newest()
        return None if folder is None else str(folder / _FILE)

    def trainer_arguments(self) -> dict[str, Any]:
        """For ``Trainer(**…)``: nodes and devices of this attempt, accumulation, and no auto-requeue of Lightning's own.

        Raises :class:`ConfigError` where the global batch is no multiple of what all ranks take in one pass: Lightning knows no
        unequal shares.
        """
        world = self._run.world_size
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if world % here:
            raise ConfigError(
                f"Lightning wants the same number of ranks on every node, not {world} with {here} here",
                remedy="give --ranks-per-node a number that all nodes hold",
            )
        arguments: dict[str, Any] = {"devices": here, "num_nodes": world // here, "enable_checkpointing": False}
        arguments["use_distributed_sampler"] = False  # ours deals the samples
        if self._run.supervised:
            arguments["plugins"] = [TorchElasticEnvironment()]
        whole, part = self._run.global_batch, self._run.micro_batch
        if whole and part:
            if whole % (part * world):
                raise ConfigError(
                    f"A global batch of {whole} is no multiple of {part} samples on {world} ranks",
                    evidence=f"Lightning knows no unequal shares; {whole} / ({part} x {world}) = {whole / (part * world):g}",
                    remedy="choose sizes that divide for every number of nodes, or use Run with a loop of your own",
                )
            arguments["accumulate_grad_batches"] = whole // (part * world)
        return arguments

    def batches(self, num_samples: int, *, shuffle: bool = True, seed: int | None = None, dataset: str = "") -> StepBatches:
        """For ``DataLoader(data, batch_sampler=…)``; see ``FileRun.batch_sampler``.  Joins the ranks.

        The loader has no end and no length: say ``max_steps``, and ``val_check_interval`` in steps.
        """
        self._run.init_process_group()
        return self._run.batch_sampler(num_samples, shuffle=shuffle, seed=seed, dataset=dataset)

    @property
    def micro_batch(self) -> int | None:
        """Samples per forward pass on one rank: the loader's ``batch_size``."""
        return self._run.micro_batch

    # -- Lightning calls these ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is restored: the run begins to count."""
        self._run.require_world("Lightning", trainer.world_size, "Trainer(**resilience.trainer_arguments())")
        self._trainer = trainer
        self._run.start(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step: all that is due."""
        if trainer.global_step <= self._run.step:
            self._run.beat()
            return
        figures = {name: value for name, value in trainer.callback_metrics.items() if name.replace("_", "").isalnum()}
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            figures.setdefault("loss", loss)
        for reserved in ("step", "attempt", "world", "t"):
            figures.pop(reserved, None)
        if not self._run.advance(**figures):
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # Lightning validates once more before it stops; the time is not ours

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation has a limit of its own."""
        if self._run.started:
            self._sections.append(self._run.section("eval"))
            self._sections[-1].__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to training."""
        if self._sections:
            self._sections.pop().__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The end of the work, or of this attempt."""
        self._run.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Signal handlers of before."""
        self._run.close()

    def _write(self, folder: Path) -> None:
        assert self._trainer is not None
        self._trainer.save_checkpoint(folder / _FILE)
