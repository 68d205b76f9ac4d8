"""How long to train between two saves: Young's and Daly's rules, and the exact optimum."""

from __future__ import annotations

import math

from slurm_resilience.errors import ConfigError

# What a run takes when nothing ever fails: the upper bound of checkpoint.auto_bounds_min.
LONGEST_S = 3600.0


def young_s(save_s: float, mttf_s: float) -> float:
    """√(2·w·M).  Source: Young 1974."""
    return math.sqrt(2 * save_s * mttf_s)


def daly_s(save_s: float, mttf_s: float) -> float:
    """√(2·w·M) - w, or M when a save costs half the time between failures or more.  Source: Daly 2006, first order."""
    return young_s(save_s, mttf_s) - save_s if save_s < mttf_s / 2 else mttf_s


def best_s(save_s: float, mttf_s: float) -> float:
    """The interval with the highest exact ETTR; it depends on neither restart nor queue.

    It solves λΔ = 1 - exp(-λ(Δ + w)).  Raises :class:`ConfigError` when saves cost nothing or nothing ever fails, because
    then there is no best interval.
    """
    if save_s <= 0 or not math.isfinite(mttf_s):
        raise ConfigError(
            "There is no best checkpoint interval when " + ("a save costs nothing" if save_s <= 0 else "nothing ever fails"),
            evidence="saving more often, or less often, would then always be better",
            remedy="give the seconds for which a save stops training, and a failure rate above 0",
        )
    low, high = 0.0, mttf_s
    for _ in range(200):
        middle = (low + high) / 2
        if -math.expm1(-(middle + save_s) / mttf_s) > middle / mttf_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2
