"""Which samples does this rank take in this step, and how much does each of its micro-batches count?

The order of samples and the cuts of the batch are arithmetic (``elastic``); here they meet the run: its rank, its world, its
step, its checkpoint.  The place in the data depends on the step alone, so nothing that was prefetched can be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from slurm_resilience.elastic.batch import BatchPlan, Deal, LossOf, MicroBatch, loss_scale, plan_batch
from slurm_resilience.elastic.order import GlobalBatch, Position, SampleOrder
from slurm_resilience.errors import ConfigError

Loss = TypeVar("Loss", float, torch.Tensor)


@dataclass(frozen=True)
class Micro:
    """One forward and backward pass of this rank.

    ``indices`` are the samples; in a stream, which has none, ``places`` are (shard, place in it).  ``weight`` is their share of
    the step's mean gradient; zero for a filler, which is run only because every rank has to make the same number of passes.
    ``last`` says that gradients may now cross the ranks, whose mean divides them by ``mean_over`` (1: they are summed).
    """

    indices: tuple[int, ...]
    weight: float
    filler: bool
    first: bool
    last: bool
    mean_scale: float
    sum_scale: float
    mean_over: int = 1
    places: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.indices) or len(self.places)


class Source(Protocol):
    """A place in the data that survives: what a checkpoint keeps of it, and how it moves."""

    @property
    def plan(self) -> BatchPlan:
        """How the global batch is divided over the ranks with samples of their own."""
        ...

    def seek(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Stand at ``step``, whose place was recorded as ``state``; None is the very beginning."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """The record of the place before ``step``: the same on every rank."""
        ...

    def state_at(self, step: int) -> dict[str, Any]:
        """The record for a checkpoint of ``step`` that has none.  Raises ConfigError where nobody can tell."""
        ...

    def advance(self, step: int) -> None:
        """Everything before ``step`` is consumed."""
        ...


class Batches:
    """The same global batch at step ``s`` on any number of ranks: ``for micro in batches(step)``.

    Made by ``run.batches(…)``.
    """

    def __init__(
        self,
        order: SampleOrder,
        plan: BatchPlan,
        *,
        rank: int,
        reduce: LossOf = "mean",
        follows_world: bool = False,
    ) -> None:
        self.order = order
        self.plan = plan
        self.rank = rank
        self._reduce: LossOf = reduce
        self._follows_world = follows_world
        self._step = 0
        self._position = Position()
        self._last: tuple[int, GlobalBatch] | None = None

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch

    def __call__(self, step: int) -> Iterator[Micro]:
        """This rank's micro-batches of one step, in order."""
        yield from self._cut(self.global_ids(step))

    def of_rank(self, step: int, rank: int) -> Iterator[Micro]:
        """The micro-batches that another rank takes in a step; looking changes nothing."""
        yield from self._cut(self.global_ids(step), rank)

    def ahead(self, step: int) -> Iterator[tuple[int, int, Micro]]:
        """(step, epoch, micro-batch) from ``step`` on, without end; looking ahead changes nothing."""
        batch = self._batch(step)
        while True:
            for micro in self._cut(batch.ids):
                yield step, batch.epoch, micro
            step, batch = step + 1, self.order.batch(batch.after, self.global_batch)

    def _cut(self, ids: tuple[int, ...], rank: int | None = None) -> Iterator[Micro]:
        plan = self.plan.resized(len(ids))
        passes = plan.micro_batches(self.rank if rank is None else rank, reduce=self._reduce)
        mean_over = plan.dp_ranks if self._reduce == "mean" else 1
        for place, one in enumerate(passes):
            yield _micro(ids, one, place == 0, place == len(passes) - 1, mean_over)

    def global_ids(self, step: int) -> tuple[int, ...]:
        """The samples of one step over all ranks, in their order.

        Raises :class:`ConfigError` for a step before the one that the run stands at.
        """
        return self._batch(step).ids

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step's samples belong to."""
        return self._batch(step).epoch

    def seek(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Stand at ``step``, whose place in the data a checkpoint recorded as ``state``; None is the very beginning.

        Raises :class:`ConfigError` when the record belongs to other data, another order or another global batch.
        """
        if not self._follows_world:
            same_batch(state, self.global_batch)
        self._position = Position() if state is None else self.order.resume(state)
        self._step = step
        self._last = None

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps of the place before ``step``: the same few numbers on every rank."""
        position = self._position if step == self._step else self._batch(step).before
        return {**self.order.state(position), "global_batch": self.global_batch, "step": step}

    def state_at(self, step: int) -> dict[str, Any]:
        """The record that a checkpoint of ``step`` would hold, had these batches been used from the very beginning."""
        if self._follows_world and step:
            raise unknown_place(step, "the batch has followed the world")
        position = self.order.position_at(step, self.global_batch)
        return {**self.order.state(position), "global_batch": self.global_batch, "step": step}

    def advance(self, step: int) -> None:
        """Everything before ``step`` is consumed."""
        while self._step < step:
            self._position = self._batch(self._step).after
            self._step += 1

    def _batch(self, step: int) -> GlobalBatch:
        if step < self._step:
            raise ConfigError(
                f"Batches of step {step} were asked for, but the run stands at step {self._step}",
                evidence="samples of completed steps are consumed",
                remedy="ask for the step that run.steps() gives",
            )
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        at, position = self._step, self._position
        if self._last is not None and self._step <= self._last[0] < step:
            at, position = self._last[0] + 1, self._last[1].after
        batch = self.order.batch(position, self.global_batch)
        while at < step:
            at += 1
            batch = self.order.batch(batch.after, self.global_batch)
        self._last = (step, batch)
        return batch


def same_batch(state: Mapping[str, Any] | None, global_batch: int) -> None:
    """Raise :class:`ConfigError` when a checkpoint's record is of another global batch."""
    if state is not None and state.get("global_batch") != global_batch:
        raise ConfigError(
            f"The checkpoint was trained with a global batch of {state.get('global_batch')}, not {global_batch}",
            evidence="the checkpoint records it with its place in the data",
            remedy="give back the old global batch (micro-batch and world size may change), or start a new run folder",
        )


def unknown_place(step: int, why: str) -> ConfigError:
    """The error for data that a checkpoint knows nothing of, where arithmetic does not help."""
    return ConfigError(
        f"Nobody can tell where in the data step {step} begins",
        evidence=f"the checkpoint keeps no place for this data, and {why}",
        remedy="use the same data under the same name= as before, or start a new run folder",
    )


def refuse_rank(rank: int, ranks: int) -> None:
    """Raise :class:`ConfigError` for a place among the ranks with samples of their own that there is not."""
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"Rank {rank} of {ranks} has no share of the batch",
            evidence=f"dp_rank={rank}, dp_ranks={ranks}; what is not given is taken from the mesh of the plan",
            remedy="give both dp_rank= and dp_ranks=, with 0 <= dp_rank < dp_ranks, or neither",
        )


def one_size(name: str, asked: int | None, planned: int | None) -> int | None:
    """A size from the script or from the run.  Raises :class:`ConfigError` when they contradict each other."""
    if asked is not None and planned is not None and asked != planned:
        raise ConfigError(
            f"run.batches({name}={asked}) contradicts the run, which is configured with {planned}",
            evidence="the plan of the ranks, and the checkpoints of this run, stand on the latter",
            remedy=f"leave {name} out of run.batches(), or change the configuration of the run",
        )
    return planned if asked is None else asked


def make_batches(
    num_samples: int,
    global_batch: int | None,
    micro_batch: int | None,
    *,
    rank: int,
    ranks: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    dataset: str,
    deal: Deal,
    reduce: LossOf,
    follows_world: bool = False,
) -> Batches:
    """Batches from the user's numbers.  Raises :class:`ConfigError` for numbers that make no sense."""
    if global_batch is None:
        raise ConfigError(
            "Nobody says how many samples a step takes",
            remedy="run.batches(n, global_batch=…), or submit the run with global_batch",
        )
    refuse_rank(rank, ranks)
    order = SampleOrder(num_samples, seed=seed, shuffle=shuffle, drop_last=drop_last, dataset=dataset)
    order.steps_per_epoch(global_batch)
    plan = plan_batch(global_batch, micro_batch or -(-global_batch // ranks), ranks, deal=deal)
    return Batches(order, plan, rank=rank, reduce=reduce, follows_world=follows_world)


def scale_loss(
    loss: Loss,
    micro: Micro,
    *,
    reduction: LossOf = "mean",
    tokens: int | torch.Tensor | None = None,
    total_tokens: int | float | None = None,
) -> Loss:
    """The loss whose gradient, reduced over micro-batches and ranks, is the gradient of the mean over the global batch.

    That mean is over samples, or over tokens when both counts are given: those of this micro-batch, and those of the step over
    all ranks.  Raises :class:`ConfigError` for counts that make no sense, and for the mean over no token, which is NaN.
    """
    if (tokens is None) != (total_tokens is None):
        raise ConfigError(
            "A token-weighted loss needs tokens= and total_tokens=",
            evidence=f"tokens={tokens}, total_tokens={total_tokens}",
            remedy="count the tokens of all micro-batches of the step first: total = run.total_tokens(mine)",
        )
    if tokens is None or total_tokens is None:
        return loss * (micro.mean_scale if reduction == "mean" else micro.sum_scale)
    count = 0 if micro.filler else int(tokens)
    if count == 0 and reduction == "mean" and not micro.filler:
        raise ConfigError(
            "A micro-batch without a token has no mean loss",
            evidence="the mean over nothing is NaN, and so would be the gradients of all ranks",
            remedy="sum the loss over the tokens, and give run.scale_loss(…, reduction='sum')",
        )
    return loss * loss_scale(count, round(float(total_tokens)), micro.mean_over, loss=reduction)


def _micro(ids: Sequence[int], one: MicroBatch, first: bool, last: bool, mean_over: int) -> Micro:
    return Micro(
        indices=tuple(ids[place] for place in one.positions),
        weight=float(one.weight),
        filler=one.filler,
        first=first,
        last=last,
        mean_scale=one.mean_scale,
        sum_scale=one.sum_scale,
        mean_over=mean_over,
    )
