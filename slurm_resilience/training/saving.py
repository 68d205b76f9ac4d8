"""One checkpoint of everything registered, taken by all ranks at the same step.

A failed save costs that checkpoint and nothing else: the older ones stand, training goes on, and the failure is a fact.
A newer attempt's fence is different: this process is a leftover, and must end.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from slurm_resilience.checkpoint import dcp
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, Fenced
from slurm_resilience.progress.sections import LEARNED, Phase
from slurm_resilience.training import rng
from slurm_resilience.training.data import Source
from slurm_resilience.training.link import Link
from slurm_resilience.training.optimizer import learning_rates
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.state import Registry, Snapshot
from slurm_resilience.training.verify import last_lr
from slurm_resilience.training.world import World

FORMAT_VERSION = 1

log = logging.getLogger(__name__)


class Saver:
    """Takes checkpoints and remembers when the last one was taken and how long it took."""

    def __init__(self, *, world: World, registry: Registry, link: Link, store: CheckpointStore, mesh: dict[str, int]) -> None:
        self._world = world
        self._registry = registry
        self._link = link
        self._store = store
        self._mesh = mesh
        self.batches: dict[str, Source] = {}
        self.probe: Probe | None = None
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        self.cost_s: float | None = None

    def save(self, step: int, metrics: dict[str, Any]) -> Entry | None:
        """Save the state after ``step`` completed steps; None when that failed.  All ranks must come.

        Raises :class:`Fenced` when a newer attempt owns the checkpoints, ConfigError for state that cannot be kept.
        """
        self._link.push("checkpoint", Phase.CHECKPOINT, LEARNED)
        began = time.monotonic()
        leads = self._world.rank == 0
        if leads:
            self._link.send("checkpoint_started", step=step)
        try:
            snapshot = self._world.team.agree(f"taking the state of step {step}", lambda: self.snapshot(step))
            entry = dcp.save(
                self._store,
                dict(snapshot.tensors),
                step=step,
                metrics={name: value for name, value in metrics.items() if name == "loss" and _is_number(value)},
                extra={"training": snapshot.plain},
                per_rank={"rng": rng.capture()},
                process_group=self._world.checkpoint,
                mesh=self._mesh,
            )
        except Fenced:
            raise
        except CheckpointError as error:
            log.error("the checkpoint of step %d was not taken: %s", step, error)
            if leads:
                self._link.send("checkpoint_failed", step=step, error=str(error))
            return None
        finally:
            self.saved_at = time.monotonic()
            self._link.pop()
        self.saved_step = step
        self.cost_s = time.monotonic() - began
        if leads:
            self._link.send(
                "checkpoint_committed", step=step, name=entry.name, bytes=entry.bytes, seconds=round(self.cost_s, 6)
            )
        return entry

    def snapshot(self, step: int) -> Snapshot:
        """All that a checkpoint of ``step`` keeps, except what belongs to one rank alone.  Changes nothing."""
        probe = None
        if self.probe is not None:
            probe = {"loss": self.probe.measure(self._registry.models.values()), "batch": len(self.probe.batch)}
        taken = self._registry.capture()
        if self.probe is not None:
            taken.tensors.update({f"probe/{place}": one for place, one in enumerate(self.probe.batch)})
        taken.plain.update(
            v=FORMAT_VERSION,
            counters={"step": step, "world": self._world.size},
            data={name: batches.state(step) for name, batches in self.batches.items()},
            lr={label: learning_rates(one) for label, one in self._registry.optimizers.items()},
            last_lr={label: last_lr(one) for label, one in self._registry.schedulers.items()},
            probe=probe if probe is None or math.isfinite(probe["loss"]) else {**probe, "loss": str(probe["loss"])},
        )
        return taken


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
