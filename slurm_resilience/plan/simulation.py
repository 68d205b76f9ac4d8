"""A run with random failures, simulated failure by failure; time is conserved.

Failures arrive while the job holds its nodes; they may hit a restart, they cannot hit the queue.  All cycles from one
failure to the next are computed at once in NumPy, so that a year of 100,000 GPUs takes well under a second.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slurm_resilience.errors import ConfigError
from slurm_resilience.observe.ledger import Ledger
from slurm_resilience.plan.scenario import DAY_S, Scenario

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The ratio's standard error is then below 0.3 % even where four fifths of the time are lost.
_LEAST_FAILURES = 2_000_000
_LEAST_FAILURES_WEIBULL = 200_000
_CHUNK = 1 << 20
# Beyond these an answer takes minutes and gigabytes, or never comes; a year of a million typical nodes is 2.4 million failures.
_MOST_FAILURES = 1 << 27
_LEAST_SHAPE = 0.1


def simulate(
    scenario: Scenario, *, days: float = 365.0, seed: int = 0, shape: float = 1.0, failures: int = _LEAST_FAILURES
) -> Ledger:
    """The ledger of at least ``days`` of holding nodes, and of as many more as ``failures`` take, for a small sampling error.

    ``shape`` is that of each node's Weibull time to failure: 1 is memoryless; below 1 a node that just failed, or is new, is
    likelier to fail again (all nodes are then renewed every ``days``).  The same seed gives the same draws for every
    scenario, so that differences between scenarios are not noise.
    """
    if shape <= 0 or days <= 0:
        raise ConfigError(f"shape={shape}, days={days}: both must be above zero")
    if not (math.isfinite(shape) and math.isfinite(days)) or shape < _LEAST_SHAPE:
        raise ConfigError(
            f"A simulation with shape={shape:g} over {days:g} days makes no sense",
            remedy=f"give a shape of {_LEAST_SHAPE} or more: fleets show 0.7 to 1",
        )
    rate = scenario.failures_per_s
    if not rate * days * DAY_S <= _MOST_FAILURES:
        raise ConfigError(
            f"{rate * days * DAY_S:.2g} failures are too many to simulate",
            evidence=f"{scenario.nodes} nodes, {scenario.rate:g} failures per node-day, {days:g} days",
            remedy="simulate fewer days, or nodes",
        )
    if rate == 0:
        return _undisturbed(scenario, days * DAY_S)
    import numpy as np

    random = np.random.default_rng(seed)
    if shape != 1.0:
        return _cycles(scenario, _weibull_gaps(random, scenario, days * DAY_S, shape))
    wanted = max(failures, round(rate * days * DAY_S))
    total = Ledger(0.0)
    while total.failures < wanted:
        gaps = random.exponential(1.0, min(_CHUNK, wanted - total.failures)) / rate
        total = _add(total, _cycles(scenario, gaps))
    return total


def _undisturbed(scenario: Scenario, held_s: float) -> Ledger:
    whole = scenario.interval_s + scenario.save_s
    intervals = max(1, int(held_s // whole))
    return Ledger(intervals * whole, productive_s=intervals * scenario.interval_s, saving_s=intervals * scenario.save_s)


def _cycles(scenario: Scenario, gaps: NDArray[np.float64]) -> Ledger:
    """Cycles of queue, restart, intervals with their saves, and what the failure at the end of the gap destroyed."""
    import numpy as np

    whole = scenario.interval_s + scenario.save_s
    restart = np.minimum(gaps, scenario.restart_s)
    trained = gaps - restart
    kept = np.floor(trained / whole)
    queued = len(gaps) * scenario.queue_s
    return Ledger(
        wall_s=float(gaps.sum()) + queued,
        productive_s=float(kept.sum()) * scenario.interval_s,
        saving_s=float(kept.sum()) * scenario.save_s,
        lost_s=float((trained - kept * whole).sum()),
        restart_s=float(restart.sum()),
        queued_s=queued,
        failures=len(gaps),
        requeues=len(gaps),
    )


def _add(one: Ledger, other: Ledger) -> Ledger:
    return Ledger(
        one.wall_s + other.wall_s,
        one.productive_s + other.productive_s,
        one.saving_s + other.saving_s,
        one.lost_s + other.lost_s,
        one.restart_s + other.restart_s,
        one.queued_s + other.queued_s,
        one.reduced_s + other.reduced_s,
        one.failures + other.failures,
        one.requeues + other.requeues,
    )


def _weibull_gaps(random: np.random.Generator, scenario: Scenario, horizon_s: float, shape: float) -> NDArray[np.float64]:
    """Times between the failures of any node over many horizons; a node is renewed when it fails and at each horizon."""
    import numpy as np

    mean = DAY_S / scenario.rate
    scale = mean / math.gamma(1 + 1 / shape)
    expected = horizon_s / mean
    draws = int(expected + 8 * math.sqrt(expected) + 16)
    repeats = max(1, math.ceil(_LEAST_FAILURES_WEIBULL / (expected * scenario.nodes)))
    rows = repeats * scenario.nodes
    found = []
    for start in range(0, rows, max(1, _CHUNK // draws)):
        horizon = np.arange(start, min(start + max(1, _CHUNK // draws), rows)) // scenario.nodes
        times = np.cumsum(scale * random.weibull(shape, (len(horizon), draws)), axis=1)
        while float(times[:, -1].min()) < horizon_s:
            more = np.cumsum(scale * random.weibull(shape, (len(horizon), draws)), axis=1) + times[:, -1:]
            times = np.concatenate([times, more], axis=1)
        found.append((times + horizon[:, None] * horizon_s)[times < horizon_s])
    moments = np.sort(np.concatenate(found))
    gaps: NDArray[np.float64] = np.diff(moments, prepend=0.0)
    return gaps
