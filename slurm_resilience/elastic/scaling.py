"""The other choice: keep the accumulation, let the batch follow the world, and scale the learning rate.

Nothing does this unless the user asks for it: it is another experiment, and the number that changes is said.  By default
the global batch is a constant and the learning rate is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from slurm_resilience.errors import ConfigError, nearest

Rule = Literal["linear", "sqrt", "none"]
RULES = ("linear", "none", "sqrt")


@dataclass(frozen=True)
class ScaledBatch:
    """The batch of a changed world, exactly proportional, and what to multiply the scheduled learning rate with."""

    global_batch: int
    ratio: Fraction
    rule: Rule

    @property
    def lr_factor(self) -> float:
        """1 at the reference world: linear (Goyal et al. 2017), square root (Krizhevsky 2014), or left alone."""
        if self.rule == "none":
            return 1.0
        return float(self.ratio) if self.rule == "linear" else float(self.ratio) ** 0.5


def scale_batch(global_batch: int, reference_dp_ranks: int, dp_ranks: int, rule: Rule) -> ScaledBatch:
    """The batch that keeps the samples of each rank, and so the accumulation, of ``reference_dp_ranks`` on ``dp_ranks``.

    The ratio is of the batches, also where the division leaves a rest (the rest is left off).  Raises :class:`ConfigError`
    for an unknown rule or when no sample would be left.
    """
    if rule not in RULES:
        raise ConfigError(f"Unknown rule {rule!r} to scale the learning rate", remedy=nearest(rule, RULES))
    if min(global_batch, reference_dp_ranks, dp_ranks) < 1 or global_batch < reference_dp_ranks:
        raise ConfigError(
            f"A global batch of {global_batch} on {reference_dp_ranks} data-parallel ranks cannot be scaled to {dp_ranks}",
            evidence="each rank of the reference must have at least one sample",
            remedy="use a larger global batch, or a smaller reference",
        )
    scaled = global_batch * dp_ranks // reference_dp_ranks
    return ScaledBatch(scaled, Fraction(scaled, global_batch), rule)
