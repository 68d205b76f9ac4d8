"""Data without random access: shards that are read from their beginning, dealt to the ranks that there are.

Which samples make a step follows from who reads what, so the order changes with the world; that each sample is read once per
epoch does not.  After each rank has taken its share of a step, all of them exchange how far they have come.  So every rank
knows the whole ledger, a checkpoint holds it once, and any number of ranks and workers can go on from it.  When readers run
dry before the others, what is left is dealt anew, but an open shard stays whole: at an epoch's end steps can be short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from slurm_resilience.elastic.batch import BatchPlan, LossOf, loss_scale
from slurm_resilience.elastic.shards import ShardLedger, ShardTask
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.data import Micro, same_batch, unknown_place
from slurm_resilience.training.loader import WorkerStart, refuse_ours
from slurm_resilience.training.sample_rng import seeded

Item = tuple[
    Any, ...
]  # (shard, samples of it read so far, whether that was its end) and, unless the shard is empty, the sample
Exchange = Callable[[Any], list[Any]]


class ShardedDataset(Protocol):
    """What a stream can be made of.  Reading a shard again must give the same samples in the same order."""

    @property
    def num_shards(self) -> int: ...

    def read_shard(self, shard: int, skip: int) -> Iterator[Any]:
        """The samples of one shard, from number ``skip`` on."""
        ...


class Stream:
    """``for micro, batch in stream(step)``: this rank's micro-batches of one step, collated.  Made by ``run.loader(…)``."""

    def __init__(
        self,
        dataset: ShardedDataset,
        plan: BatchPlan,
        *,
        rank: int,
        seed: int,
        exchange: Exchange,
        shuffle: bool = True,
        fingerprint: str = "",
        reduce: LossOf = "mean",
        follows_world: bool = False,
        seed_samples: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        refuse_ours(options)
        self.plan, self.rank = plan, rank
        self._dataset, self._exchange, self._fingerprint, self._reduce = dataset, exchange, fingerprint, reduce
        self._follows_world = follows_world
        self._seed = seed if seed_samples else None
        self._collate = collate_fn or default_collate
        self._options = {**options, "num_workers": num_workers, "worker_init_fn": WorkerStart(worker_init_fn)}
        self._ledger = ShardLedger(dataset.num_shards, seed=seed, shuffle=shuffle)
        self._items: Iterator[Item] | None = None
        self._step = self._epoch = 0
        self._taken: tuple[ShardLedger, list[tuple[Micro, list[Any]]]] | None = None
        self._spare: list[Any] = []

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the samples that the step has been given; before that, the one that the stream stands in."""
        return self._epoch

    def __call__(self, step: int) -> Iterator[tuple[Micro, Any]]:
        """All ranks must come: what each of them has taken decides how much its samples weigh."""
        if step != self._step:
            raise ConfigError(
                f"The stream stands at step {self._step}, and samples of step {step} were asked for",
                evidence="a stream has no random access",
                remedy="ask for the step that run.steps() gives",
            )
        if self._taken is None:
            self._taken = self._take()
        for micro, samples in self._taken[1]:
            yield micro, self._collate(samples)

    # -- the place in the data --------------------------------------------------------------------------------

    def seek(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Stand at ``step``.  Raises :class:`ConfigError` when the record belongs to other data or another global batch."""
        ledger = ShardLedger(self._dataset.num_shards, seed=self._ledger.seed, shuffle=self._ledger.shuffle)
        if state is not None:
            if not self._follows_world:
                same_batch(state, self.plan.global_batch)
            kept = state.get("stream")
            if not isinstance(kept, Mapping):
                raise unknown_place(step, "its record is that of data with random access")
            mine = (self._fingerprint, ledger.seed, ledger.shuffle)
            theirs = (state.get("fingerprint"), kept["seed"], kept["shuffle"])
            if mine != theirs:
                raise ConfigError(
                    "The checkpoint was trained on another data set, or on this one in another order",
                    evidence=f"fingerprint, seed and shuffle were {theirs}, now they are {mine}",
                    remedy="give back the data set, seed and shuffle of the checkpoint, or start a new run",
                )
            ledger = ShardLedger.resume(kept, num_shards=self._dataset.num_shards)
        self._ledger, self._step, self._epoch, self._taken, self._items = ledger, step, ledger.epoch, None, None

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps of the place before ``step``: the same on every rank."""
        ledger = self._taken[0] if self._taken is not None and step > self._step else self._ledger
        return {
            "stream": ledger.state(),
            "fingerprint": self._fingerprint,
            "global_batch": self.plan.global_batch,
            "step": step,
        }

    def state_at(self, step: int) -> dict[str, Any]:
        """Only the beginning is known without a record."""
        if step:
            raise unknown_place(step, "a stream has no random access")
        return self.state(0)

    def advance(self, step: int) -> None:
        """What was taken for the steps before ``step`` is consumed."""
        if step > self._step:
            if self._taken is not None:
                if self._taken[0].epoch != self._ledger.epoch:
                    self._items = None
                self._ledger = self._taken[0]
            self._step, self._taken = step, None

    def close(self) -> None:
        """End the workers."""
        self._items = None

    # -- one step ---------------------------------------------------------------------------------------------

    def _take(self) -> tuple[ShardLedger, list[tuple[Micro, list[Any]]]]:
        """This rank's part of the next step, and the ledger after all ranks have taken theirs."""
        ledger, mine, ranks = self._ledger, list[Item](), self.plan.dp_ranks
        while True:
            self._items = self._items or self._read(ledger)
            progress = _pull(self._items, self.plan.samples_of(self.rank), mine)
            everyone: dict[int, tuple[int, dict[int, tuple[int, bool]]]]
            everyone = dict(self._exchange((self.rank, (len(mine), progress))))  # ranks that share samples say the same
            after = ledger.advance((shard, *far) for _, said in everyone.values() for shard, far in said.items())
            counts = {rank: count for rank, (count, _) in everyone.items()}
            dry = sum(count < self.plan.samples_of(rank) for rank, count in counts.items())
            over = after.epoch != ledger.epoch
            # Deal again while a rank has a shard to spare for one that is dry, and start over where only empty ones were.
            if not dry or (over and any(counts.values())) or (not over and len(after.remaining()) <= ranks - dry):
                self._epoch = ledger.epoch
                return after, list(self._cut(mine, counts))
            if after.epoch > self._ledger.epoch + 1:
                raise ConfigError("No shard of the data set has a sample", evidence=f"{ledger.num_shards} shards were read")
            ledger, self._items = after, None

    def _cut(self, mine: list[Item], counts: Mapping[int, int]) -> Iterator[tuple[Micro, list[Any]]]:
        """Micro-batches, as many on every rank, weighted by the number of samples that all ranks really have."""
        size, total, ranks = self.plan.micro_batch, sum(counts.values()), self.plan.dp_ranks
        passes = -(-max(counts.values()) // size)
        for number in range(passes):
            chunk = mine[number * size : (number + 1) * size]
            samples = [item[3] for item in chunk] or self._spare or [self._any_sample()]
            self._spare = samples
            micro = Micro(
                indices=(),
                weight=len(chunk) / total,
                filler=not chunk,
                first=number == 0,
                last=number == passes - 1,
                mean_scale=loss_scale(len(chunk), total, ranks, reduce=self._reduce),
                sum_scale=loss_scale(len(chunk), total, ranks, loss="sum", reduce=self._reduce),
                mean_over=ranks if self._reduce == "mean" else 1,
                places=tuple((shard, count - 1) for shard, count, *_ in chunk),
            )
            yield micro, samples

    def _any_sample(self) -> Any:
        """Something to run a filler on, for a rank that has never had a sample: its loss counts for nothing."""
        alone = _Reader(self._dataset, ShardLedger(self._dataset.num_shards, shuffle=False), 0, 1, self._seed)
        return next(item[3] for item in alone if len(item) > 3)

    def _read(self, ledger: ShardLedger) -> Iterator[Item]:
        reader = _Reader(self._dataset, ledger, self.rank, self.plan.dp_ranks, self._seed)
        generator = torch.Generator().manual_seed(ledger.epoch)  # making an iterator draws; the training must not notice
        loader = DataLoader(reader, batch_size=self.plan.micro_batch, collate_fn=list, generator=generator, **self._options)
        for items in loader:
            yield from items


class _Reader(IterableDataset[Item]):
    """The shards of one rank, as its workers read them."""

    def __init__(self, dataset: ShardedDataset, ledger: ShardLedger, rank: int, ranks: int, seed: int | None) -> None:
        self._dataset, self._ledger, self._rank, self._ranks, self._seed = dataset, ledger, rank, ranks, seed

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        # Ranks first: when few shards are left, each goes to another rank.
        for task in self._ledger.deal(self._ranks * workers)[worker * self._ranks + self._rank]:
            yield from self._shard(task)

    def _shard(self, task: ShardTask) -> Iterator[Item]:
        samples = self._samples(task)
        count, sample = task.skip, next(samples, samples)
        if sample is samples:
            yield task.shard, count, True
        while sample is not samples:
            following = next(samples, samples)
            count += 1
            yield task.shard, count, following is samples, sample
            sample = following

    def _samples(self, task: ShardTask) -> Iterator[Any]:
        place, samples = task.skip, iter(self._dataset.read_shard(task.shard, task.skip))
        while True:
            if self._seed is None:
                sample = next(samples, samples)
            else:
                with seeded(self._seed, self._ledger.epoch, task.shard, place):
                    sample = next(samples, samples)
            if sample is samples:
                return
            yield sample
            place += 1


def _pull(items: Iterator[Item], share: int, mine: list[Item]) -> dict[int, tuple[int, bool]]:
    """Fill ``mine`` up to ``share`` samples, as far as there are any, and say how far each shard was read."""
    progress: dict[int, tuple[int, bool]] = {}
    while len(mine) < share:
        item = next(items, None)
        if item is None:
            break
        progress[item[0]] = (item[1], item[2])
        if len(item) > 3:
            mine.append(item)
    return progress
