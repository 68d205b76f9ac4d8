"""Which samples of a global batch does each data-parallel rank take, and with what weight?

The batch is a constant of the experiment: for any number of ranks the same samples enter the same mean gradient.
The global batch is cut into micro-batches of fixed size first, at the same places for every world size, and these
are dealt to the ranks pass by pass (pass ``p`` of rank ``r`` of ``W`` takes cut ``p*W + r``), so that a pass sees
the shapes and, for what is not additive over samples, the company that it has in a single process.

What is left over after the last full round, fewer samples than one micro-batch per rank, makes one more pass:

* ``deal="even"`` (default) spreads them sample by sample, so ranks differ by one sample at most (2,048 over 48: 43
  and 42) and none idles that could work; micro-batches of this one pass are smaller.
* ``deal="whole"`` keeps even these cuts and deals whole micro-batches: every pass has the same shape (no second
  compilation, BatchNorm statistics independent of the world size), but ranks may differ by a micro-batch.

Both take the same number of passes.  Every rank makes that same number of forward and backward passes, because
FSDP2 gathers parameters in each of them and a rank that is missing would hang the others.  A rank that has no sample
in the last pass gets a *filler*: a micro-batch of real samples whose loss is multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from slurm_resilience.errors import ConfigError

Deal = Literal["even", "whole"]
LossOf = Literal["mean", "sum"]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    ``positions`` are places in the global batch.  ``weight`` is this pass's exact share of the global mean gradient
    (0 for a filler).  Multiply the *mean* loss over ``positions`` by ``mean_scale``, or their *sum* by ``sum_scale``.
    """

    positions: range
    weight: Fraction
    filler: bool
    mean_scale: float
    sum_scale: float


@dataclass(frozen=True)
class BatchPlan:
    """The same global batch on ``dp_ranks`` ranks.  Every answer is computed in constant time per micro-batch."""

    global_batch: int
    micro_batch: int
    dp_ranks: int
    deal: Deal = "even"

    @property
    def accumulation(self) -> int:
        """Forward and backward passes per optimizer step, the same on every rank."""
        return -(-self.global_batch // (self.micro_batch * self.dp_ranks))

    @property
    def _rounds(self) -> int:
        """Passes in which every rank has a whole micro-batch."""
        return self.global_batch // (self.micro_batch * self.dp_ranks)

    def _tail(self, rank: int) -> range:
        """The rank's positions in the last, partial pass; empty when it has none."""
        start = self._rounds * self.micro_batch * self.dp_ranks
        left = self.global_batch - start
        if self.deal == "even":
            each, extra = divmod(left, self.dp_ranks)
            first = start + rank * each + min(rank, extra)
            return range(first, first + each + (rank < extra))
        first = start + rank * self.micro_batch
        return range(min(first, self.global_batch), min(first + self.micro_batch, self.global_batch))

    def samples_of(self, rank: int) -> int:
        """How many samples of each global batch are this rank's."""
        return self._rounds * self.micro_batch + len(self._tail(rank))

    @property
    def samples_per_rank(self) -> tuple[int, ...]:
        """Samples of each rank; the sum is the global batch."""
        return tuple(self.samples_of(rank) for rank in range(self.dp_ranks))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """``samples_per_rank`` as (how many ranks, samples each), without building the list."""
        whole = self._rounds * self.micro_batch
        left = self.global_batch - whole * self.dp_ranks
        if self.deal == "even":
            each, extra = divmod(left, self.dp_ranks)
            parts = [(extra, whole + each + 1), (self.dp_ranks - extra, whole + each)]
        else:
            full, short = divmod(left, self.micro_batch)
            parts = [
                (full, whole + self.micro_batch),
                (int(short > 0), whole + short),
                (self.dp_ranks - full - (short > 0), whole),
            ]
        return tuple(part for part in parts if part[0])

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks without a single sample: they only run fillers."""
        if self._rounds:
            return ()
        return tuple(rank for rank in range(self.dp_ranks) if not self._tail(rank))

    def weight_of(self, rank: int) -> Fraction:
        """The rank's exact share of the global mean gradient; over all ranks they sum to one."""
        return Fraction(self.samples_of(rank), self.global_batch)

    def micro_batches(self, rank: int, *, reduce: LossOf = "mean") -> tuple[MicroBatch, ...]:
        """The rank's passes, in order.

        ``reduce`` is what the framework does with gradients over the data-parallel ranks: DDP and FSDP2 take the
        mean; an all-reduce of one's own, or ``set_gradient_divide_factor(1)``, the sum.
        """
        if not 0 <= rank < self.dp_ranks:
            raise ValueError(f"rank {rank} of {self.dp_ranks}")
        size = self.micro_batch
        passes = [range(cut * size, (cut + 1) * size) for cut in range(rank, self._rounds * self.dp_ranks, self.dp_ranks)]
        if len(passes) < self.accumulation:
            passes.append(self._tail(rank))
        # A filler is the rank's own first micro-batch: if its loss is not finite, the step is lost anyway.
        spare = passes[0] or range(min(size, self.global_batch))
        return tuple(self._pass(positions or spare, len(positions), reduce) for positions in passes)

    def _pass(self, positions: range, count: int, reduce: LossOf) -> MicroBatch:
        return MicroBatch(
            positions=positions,
            weight=Fraction(count, self.global_batch),
            filler=count == 0,
            mean_scale=loss_scale(count, self.global_batch, self.dp_ranks, reduce=reduce),
            sum_scale=loss_scale(count, self.global_batch, self.dp_ranks, loss="sum", reduce=reduce),
        )

    def resized(self, samples: int) -> BatchPlan:
        """The plan of a batch of another size at the same cuts: the short last batch of an epoch.

        Here ranks may idle (``idle_ranks`` says which); the mean is over the samples that there are.
        """
        if samples < 1:
            raise ValueError(f"a batch of {samples} samples")
        return self if samples == self.global_batch else BatchPlan(samples, self.micro_batch, self.dp_ranks, self.deal)


def plan_batch(global_batch: int, micro_batch: int, dp_ranks: int, *, deal: Deal = "even") -> BatchPlan:
    """The plan of ``global_batch`` samples on ``dp_ranks`` ranks, none of them idle with the even deal.

    Raises :class:`ConfigError` when a size is below one or a rank would have no sample at all.
    """
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("dp_ranks", dp_ranks)):
        if value < 1:
            raise ConfigError(f"{name}={value} makes no sense", remedy=f"give {name} a value of at least 1")
    if global_batch < dp_ranks:
        raise ConfigError(
            f"A global batch of {global_batch} cannot be divided over {dp_ranks} data-parallel ranks",
            evidence=f"{dp_ranks - global_batch} of them would have no sample at all",
            remedy=f"use at most {global_batch} data-parallel ranks, or a global batch of at least {dp_ranks}",
        )
    return BatchPlan(global_batch, micro_batch, dp_ranks, deal)


def loss_scale(count: int, total: int, dp_ranks: int, *, loss: LossOf = "mean", reduce: LossOf = "mean") -> float:
    """The factor for one micro-batch's loss that makes the reduced gradient the gradient of the global mean.

    Units are samples, or tokens for a token-weighted loss: ``count`` of them in this micro-batch (0 for a filler), ``total``
    in the whole global batch over all ranks.  ``loss`` says whether the loss is a mean or a sum over its ``count``.
    A mean over zero tokens is NaN, and NaN times zero is NaN: use the sum where a micro-batch may have none.
    """
    if total < 1 or not 0 <= count <= total:
        raise ConfigError(
            f"A micro-batch of {count} out of {total} has no weight",
            evidence="the count must lie between zero and the total over all ranks, and the total must not be zero",
            remedy="sum the counts over all micro-batches of all data-parallel ranks before the first backward pass",
        )
    ranks = dp_ranks if reduce == "mean" else 1
    if count == 0:
        return 0.0
    return float(Fraction(ranks * (count if loss == "mean" else 1), total))
