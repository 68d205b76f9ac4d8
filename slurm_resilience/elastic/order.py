"""Which samples make the global batch of step ``s``?  The same ones on every world size.

The truth is global: a seed, an epoch, and how many samples of that epoch have been consumed.  No rank keeps a
place of its own, so there is nothing to translate when the number of ranks changes, in mid-epoch or twice in one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slurm_resilience.elastic.permutation import VERSION, Permutation
from slurm_resilience.errors import ConfigError


@dataclass(frozen=True, order=True)
class Position:
    """A place between two global batches: ``consumed`` samples of epoch ``epoch`` (from 0) lie behind it."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step in their global order; ``after`` is the position once they are consumed.

    ``BatchPlan.micro_batches(rank)`` gives places in ``ids``.  The last batch of an epoch may be short: weight it by
    its own size (``BatchPlan.resized(len(ids))``).
    """

    ids: tuple[int, ...]
    epoch: int
    before: Position
    after: Position


@dataclass(frozen=True)
class SampleOrder:
    """Each of ``num_samples`` samples once per epoch, in an order that depends on (seed, epoch) alone.

    With ``drop_last`` the samples that do not fill a batch at an epoch's end are passed over (other ones each
    epoch, when shuffled); without, they make a short batch.  A batch never spans two epochs.  ``dataset`` is any text
    that identifies the data; it enters the fingerprint.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    dataset: str = ""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(
                f"A data set of {self.num_samples} samples cannot be trained on", remedy="check its path and filters"
            )

    @property
    def fingerprint(self) -> str:
        """Equal exactly for the same data set in the same order."""
        parts = (VERSION, self.num_samples, self.seed, self.shuffle, self.drop_last, self.dataset)
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    def sample(self, epoch: int, place: int) -> int:
        """The sample at one place of an epoch."""
        if not self.shuffle:
            if not 0 <= place < self.num_samples:
                raise IndexError(place)
            return place
        return _permutation(self.num_samples, self.seed, epoch)[place]

    def samples(self, epoch: int, places: range) -> list[int]:
        """The samples at some places of an epoch, in the order asked for."""
        if not self.shuffle:
            return [self.sample(epoch, place) for place in places]
        return _permutation(self.num_samples, self.seed, epoch).many(places)

    def steps_per_epoch(self, global_batch: int) -> int:
        """Optimizer steps in one epoch.  Raises :class:`ConfigError` when ``drop_last`` would leave none."""
        steps = self.num_samples // global_batch if self.drop_last else -(-self.num_samples // global_batch)
        if not steps:
            raise ConfigError(
                f"With drop_last, a data set of {self.num_samples} samples has no batch of {global_batch}",
                evidence="every epoch would be empty",
                remedy="turn drop_last off or use a smaller global batch",
            )
        return steps

    def position_at(self, step: int, global_batch: int) -> Position:
        """The position before step ``step`` (from 0) of a run whose global batch never changed."""
        epoch, inside = divmod(step, self.steps_per_epoch(global_batch))
        return Position(epoch, inside * global_batch)

    def settle(self, position: Position, global_batch: int) -> Position:
        """The position from which the next batch is really taken: at an epoch's end, the start of the next one."""
        self.steps_per_epoch(global_batch)
        left = self.num_samples - position.consumed
        if left <= 0 or (self.drop_last and left < global_batch):
            return Position(position.epoch + 1, 0)
        return position

    def batch(self, position: Position, global_batch: int) -> GlobalBatch:
        """The next global batch at ``position``."""
        at = self.settle(position, global_batch)
        end = min(at.consumed + global_batch, self.num_samples)
        ids = tuple(self.samples(at.epoch, range(at.consumed, end)))
        return GlobalBatch(ids, at.epoch, position, self.settle(Position(at.epoch, end), global_batch))

    def batch_at(self, step: int, global_batch: int) -> GlobalBatch:
        """The global batch of step ``step`` (from 0) of a run whose global batch never changed."""
        return self.batch(self.position_at(step, global_batch), global_batch)

    def state(self, position: Position) -> dict[str, Any]:
        """What a checkpoint keeps: the same few numbers on every rank."""
        return {"seed": self.seed, "epoch": position.epoch, "consumed": position.consumed, "fingerprint": self.fingerprint}

    def resume(self, state: Mapping[str, Any]) -> Position:
        """The position in ``state``.  Raises :class:`ConfigError` when it belongs to other data or another order."""
        found = state.get("fingerprint", self.fingerprint)
        if found != self.fingerprint or state["seed"] != self.seed:
            raise ConfigError(
                "The checkpoint was trained on another data set, or on this one in another order",
                evidence=f"its fingerprint is {found} (seed {state['seed']}); now it is {self.fingerprint} (seed {self.seed})",
                remedy="give back the data set, seed, shuffle and drop_last of the checkpoint, or start a new run",
            )
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if epoch < 0 or not 0 <= consumed <= self.num_samples:
            raise ConfigError(
                f"The checkpoint's place in the data is impossible: epoch {epoch}, {consumed} samples consumed",
                evidence=f"an epoch has {self.num_samples} samples",
                remedy="resume from an older checkpoint",
            )
        return Position(epoch, consumed)


@lru_cache(maxsize=8)
def _permutation(num_samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_samples, (seed, epoch))
