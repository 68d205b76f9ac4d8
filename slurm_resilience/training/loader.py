"""The samples themselves, read ahead by workers, and none is lost: the place in the data is the step, not the loader's.

One DataLoader reads on without end, so workers persist over epochs, and an epoch is as long after a resume as before.  What
was prefetched and not trained on is read again by whoever comes next, since nobody has counted it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurm_resilience.errors import ConfigError
from slurm_resilience.training import rng
from slurm_resilience.training.data import Batches, Micro
from slurm_resilience.training.sample_rng import seeded
from slurm_resilience.training.signals import protect_worker

OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")


class Loader:
    """``for micro, batch in loader(step)``: this rank's micro-batches of one step, collated.  Made by ``run.loader(…)``."""

    def __init__(
        self,
        batches: Batches,
        dataset: Any,
        *,
        seed: int,
        seed_samples: bool = True,
        loader_class: Callable[..., Any] | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        refuse_ours(options)
        self.batches = batches
        self._seed = seed
        self._make: Callable[..., Any] = loader_class or DataLoader
        self._dataset = _keyed(dataset, seed if seed_samples else None)
        self._options = {**options, "worker_init_fn": WorkerStart(worker_init_fn)}
        self._loaded: Iterator[Any] | None = None
        self._read_ahead: deque[tuple[int, Micro]] = deque()
        self._next_step = -1

    def __call__(self, step: int) -> Iterator[tuple[Micro, Any]]:
        """Raises :class:`ConfigError` for a step before the one that the run stands at."""
        self.batches.global_ids(step)
        if self._loaded is None or self._next_step != step:
            self._start(step)
        self._next_step = -1  # until the last micro-batch was handed out: a step that was left in the middle is read anew
        assert self._loaded is not None
        while True:
            data = next(self._loaded)
            _, micro = self._read_ahead.popleft()
            if micro.last:
                self._next_step = step + 1
            yield micro, data
            if micro.last:
                return

    def close(self) -> None:
        """End the workers."""
        self._loaded = None
        self._read_ahead.clear()

    def _start(self, step: int) -> None:
        self.close()
        # An own generator: making an iterator draws from it, and the training's random numbers must not notice.
        generator = torch.Generator().manual_seed(rng.derive(self._seed, step, self.batches.rank, self.batches.plan.dp_ranks))
        feed = _Feed(self.batches, step, self._read_ahead)
        self._loaded = iter(self._make(self._dataset, batch_sampler=feed, generator=generator, **self._options))


class _Feed:
    """The batch sampler: runs in this process, as far ahead as the loader prefetches."""

    def __init__(self, batches: Batches, step: int, read_ahead: deque[tuple[int, Micro]]) -> None:
        self._batches, self._step, self._read_ahead = batches, step, read_ahead

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step, epoch, micro in self._batches.ahead(self._step):
            self._read_ahead.append((step, micro))
            yield [(epoch, index) for index in micro.indices]


class _OneByOne:
    """The user's data set, asked by (epoch, index)."""

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        if self.seed is None:
            return self.dataset[index]
        with seeded(self.seed, epoch, index):
            return self.dataset[index]


class _Together(_OneByOne):
    """A data set that fetches several samples at once; its random numbers follow from the first of them."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        indices = [index for _, index in keys]
        if self.seed is None:
            return self.dataset.__getitems__(indices)
        with seeded(self.seed, *keys[0]):
            return self.dataset.__getitems__(indices)


class WorkerStart:
    """The worker ignores Slurm's signals, which go to the whole step, and then does what the user wants of it."""

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        protect_worker(worker_id)
        if self._then is not None:
            self._then(worker_id)


def refuse_ours(options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for options of a DataLoader that decide what the run decides."""
    for name in OURS:
        if name in options:
            raise ConfigError(
                f"run.loader({name}=…) would be a second opinion on which samples a step takes",
                evidence="order and batch are the run's, so that they survive a change of the world size",
                remedy="say shuffle, drop_last, global_batch and micro_batch as run.batches() takes them; leave the rest out",
            )


def _keyed(dataset: Any, seed: int | None) -> _OneByOne:
    together = callable(getattr(dataset, "__getitems__", None))
    return _Together(dataset, seed) if together else _OneByOne(dataset, seed)
