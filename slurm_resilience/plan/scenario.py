"""What a plan is about: nodes that fail, saves that cost, restarts that take time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_resilience.errors import ConfigError, nearest

DAY_S = 86_400.0

# Failures per node of 8 GPUs and day.  Sources: a good fleet (FT-HSDP 2.3, RSC-2 2.3, CoreWeave 2.1 per 1,000), Meta's RSC-1
# (Kokolis et al., HPCA 2025: 6.5), and one with trouble (OPT-175B 14-16, early Ant clusters 22).
RATES = {"good": 2e-3, "typical": 6.5e-3, "bad": 20e-3}
_PER_THOUSAND_FROM = 0.1


def parse_rate(text: str) -> float:
    """Failures per node-day from a preset's name or a number.

    A number of 0.1 or more can only be meant per 1,000 node-days (0.1 per node-day would be a node that fails every
    ten days), and is read so: 6.5 and 0.0065 are the same rate.
    """
    if text in RATES:
        return RATES[text]
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a failure rate", remedy=f"give a number, or {nearest(text, RATES)}") from None
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"A failure rate of {text} makes no sense", remedy="give a number of 0 or more")
    return value / 1000 if value >= _PER_THOUSAND_FROM else value


@dataclass(frozen=True)
class Scenario:
    """A long run, in the symbols of Kokolis et al.

    ``rate`` failures per node-day (r_f) · ``interval_s`` productive seconds between saves (Δ) · ``save_s`` seconds that a save
    stops training (w) · ``restart_s`` from failure to the first step, the queue apart: detection, teardown, start, load,
    verification (u0) · ``queue_s`` seconds in the queue at each restart (q).
    """

    nodes: int
    rate: float
    interval_s: float
    save_s: float = 0.0
    restart_s: float = 0.0
    queue_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nodes", "rate", "interval_s", "save_s", "restart_s", "queue_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name}={value} makes no sense", remedy="give a finite number of 0 or more")
        if self.nodes < 1:
            raise ConfigError("A plan needs at least one node")
        if self.interval_s <= 0:
            raise ConfigError(
                "A checkpoint interval of 0 leaves no time to train",
                remedy="give an interval, or the cost of a save from which the best interval follows",
            )

    @property
    def failures_per_s(self) -> float:
        """λ = N·r_f."""
        return self.nodes * self.rate / DAY_S

    @property
    def mttf_s(self) -> float:
        """Mean time between failures of the whole job; infinite where nothing fails."""
        return 1 / self.failures_per_s if self.failures_per_s else math.inf
