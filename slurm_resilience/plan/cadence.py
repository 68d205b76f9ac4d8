"""How often to save: from what a save costs and how often things fail, with the reason in one sentence.

Too often wastes the save's stall, too seldom the work that a failure takes away; the exact optimum (Young's and Daly's rules
are its neighbours) is where the sum is least.
The rate of failures starts from a published one and moves towards what this run sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resilience.plan.interval import best_s

# Failures per node-day on a large Slurm cluster with eight GPUs a node.  Source: Kokolis et al., arXiv 2410.21680.
PRIOR_PER_NODE_DAY = 6.5e-3
# How many failures' worth of evidence that figure counts for: a run that sees three of its own mostly follows those.
PRIOR_WEIGHT = 1.0
DAY_S = 86_400.0


@dataclass(frozen=True)
class Choice:
    """Seconds between two saves, and why."""

    interval_s: float
    reason: str


def mtbf_s(*, nodes: int, observed_s: float, failures: int, prior: float = PRIOR_PER_NODE_DAY) -> float:
    """Mean time between failures of a run on ``nodes`` nodes that has seen ``failures`` in ``observed_s`` seconds.

    Finite also before the first failure, and for a run that never fails.
    """
    prior_node_days = PRIOR_WEIGHT / prior
    node_days = nodes * observed_s / DAY_S
    rate = (PRIOR_WEIGHT + failures) / (prior_node_days + node_days)
    return DAY_S / (rate * nodes)


def choose(
    *,
    stall_s: float,
    nodes: int,
    observed_s: float,
    failures: int,
    write_s: float = 0.0,
    at_least_s: float = 30.0,
    at_most_s: float = 3600.0,
    prior: float = PRIOR_PER_NODE_DAY,
) -> Choice:
    """The interval for a run whose saves keep it for ``stall_s`` and take ``write_s`` until they are durable.

    Never shorter than ``at_least_s``, nor than a background save takes (only one may be in flight), nor so short that
    stalls take a tenth of the time; never longer than ``at_most_s``, unless one of those asks for it.
    """
    mean = mtbf_s(nodes=nodes, observed_s=observed_s, failures=failures, prior=prior)
    best = best_s(stall_s, mean)
    floor, why_floor = max(
        (at_least_s, "the shortest allowed"),
        (1.2 * write_s, "as long as a save is written"),
        (9 * stall_s, "a tenth for saving"),
    )
    seen = f"{failures} failures in {observed_s / 3600:.1f} h on {nodes} nodes"
    measured = f"a save costs {stall_s:.2g} s, {seen}: one in {mean / 3600:.1f} h"
    if best < floor:
        return Choice(floor, f"{measured}; best would be {best:.0f} s, taken is {floor:.0f} s ({why_floor})")
    if best > at_most_s >= floor:
        return Choice(at_most_s, f"{measured}; best would be {best:.0f} s, taken is {at_most_s:.0f} s (the longest allowed)")
    return Choice(best, f"{measured}; best is {best:.0f} s")
