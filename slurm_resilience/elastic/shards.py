"""An iterable data set on a changed number of readers: what is left of the epoch is dealt again.

A stream has no random access, so the order of its samples follows the readers; what holds is that each sample is
read once per epoch.  The truth is global: which shards are finished, and how far each open one has been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.elastic.permutation import Permutation
from slurm_resilience.errors import ConfigError


@dataclass(frozen=True)
class ShardTask:
    """One shard to read, its first ``skip`` samples passed over."""

    shard: int
    skip: int = 0


@dataclass(frozen=True)
class ShardLedger:
    """How far an epoch over ``num_shards`` shards has come.  ``consumed`` counts samples of the open shards only."""

    num_shards: int
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    finished: frozenset[int] = frozenset()
    consumed: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shards = {*self.finished, *self.consumed}
        if self.num_shards < 1 or any(not 0 <= shard < self.num_shards for shard in shards):
            raise ConfigError(
                f"The shards on record do not fit a data set of {self.num_shards} shards",
                evidence=f"on record: {sorted(shards)[:16]}",
                remedy="give back the data set of the checkpoint, or start a new run",
            )

    def remaining(self) -> list[ShardTask]:
        """What is left of this epoch: open shards first, then the untouched ones in the epoch's order."""
        order: Iterable[int] = range(self.num_shards)
        if self.shuffle:
            shuffle = Permutation(self.num_shards, (self.seed, self.epoch))
            order = shuffle.many(range(self.num_shards))
        left = [ShardTask(shard, self.consumed.get(shard, 0)) for shard in order if shard not in self.finished]
        return sorted(left, key=lambda task: task.shard not in self.consumed)

    def deal(self, readers: int) -> tuple[tuple[ShardTask, ...], ...]:
        """The remaining shards for each reader (data-parallel rank x worker), in turn, so that counts differ by at most one."""
        if readers < 1:
            raise ConfigError(f"Shards cannot be dealt to {readers} readers")
        left = self.remaining()
        return tuple(tuple(left[reader::readers]) for reader in range(readers))

    def advance(self, progress: Iterable[tuple[int, int, bool]]) -> ShardLedger:
        """The ledger after the readers reported (shard, samples of it consumed in all, finished); it never goes back.

        When every shard is finished, the next epoch begins.  Raises :class:`ConfigError` for a shard that went backwards or
        was read again after its end, since samples would then be seen twice.
        """
        finished, consumed = set(self.finished), dict(self.consumed)
        for shard, count, over in progress:
            if shard in finished or count < consumed.get(shard, 0):
                raise ConfigError(
                    f"Shard {shard} was read twice",
                    evidence=f"reported {count} samples; on record: "
                    + ("finished" if shard in finished else f"{consumed.get(shard, 0)} samples"),
                    remedy="report the samples of a shard in all, from one reader, after they were trained on",
                )
            if over:
                finished.add(shard)
                consumed.pop(shard, None)
            elif count:
                consumed[shard] = count
        if len(finished) == self.num_shards:
            return ShardLedger(self.num_shards, self.seed, self.shuffle, self.epoch + 1)
        return ShardLedger(self.num_shards, self.seed, self.shuffle, self.epoch, frozenset(finished), consumed)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON values only."""
        return {
            "num_shards": self.num_shards,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "finished": sorted(self.finished),
            "consumed": {str(shard): count for shard, count in sorted(self.consumed.items())},
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any], *, num_shards: int) -> ShardLedger:
        """The ledger of a checkpoint.  Raises :class:`ConfigError` when the data set has another number of shards now."""
        if state["num_shards"] != num_shards:
            raise ConfigError(
                f"The checkpoint was trained on {state['num_shards']} shards, the data set has {num_shards} now",
                evidence="both are counted before anything is read",
                remedy="give back the data set of the checkpoint, or start a new run",
            )
        consumed = {int(shard): int(count) for shard, count in state["consumed"].items()}
        return cls(num_shards, state["seed"], state["shuffle"], state["epoch"], frozenset(state["finished"]), consumed)
