"""The effective training time ratio R/W in closed form: the published approximation, and the exact renewal form.

W = R + U + Q: productive, unproductive while holding the nodes, queued.  The forms, and why they disagree, are explained in
docs/explanation/interval-and-ettr.md.  Source: Kokolis et al., arXiv 2410.21680 (F1, F2); Young 1974; Daly 2006.
"""

from __future__ import annotations

import math

from slurm_resilience.plan.scenario import Scenario


def first_order(scenario: Scenario) -> float:
    """F1 and F2 in one: [1 - λ(u0 + Δ/2)] / [(1 + w/Δ)(1 + λq)].

    First order in λ: too low once λ(u0 + Δ/2) is no longer small, and below zero from 1 on, where it means nothing.
    """
    s, rate = scenario, scenario.failures_per_s
    return (1 - rate * (s.restart_s + s.interval_s / 2)) / ((1 + s.save_s / s.interval_s) * (1 + rate * s.queue_s))


def exact(scenario: Scenario) -> float:
    """F3: Δ / E[time per kept interval], for exponential failures that may also hit a restart, though not the queue.

    E[T] = exp(λ·u0)·(exp(λ(Δ+w)) - 1)·(1/λ + q).
    """
    s, rate = scenario, scenario.failures_per_s
    if rate == 0:
        return s.interval_s / (s.interval_s + s.save_s)
    try:
        expected = math.exp(rate * s.restart_s) * math.expm1(rate * (s.interval_s + s.save_s)) * (1 / rate + s.queue_s)
    except OverflowError:  # no interval ever ends before the next failure
        return 0.0
    return s.interval_s / expected


def estimate(scenario: Scenario) -> float:
    """The number to compare with published ones: the first-order form where it holds, the exact form's neighbourhood beyond.

    Published figures were computed with the first-order form, which is the cautious one.  It collapses when failures are
    frequent, so it is kept within a tenth below the exact form, and never above it.
    """
    truth = exact(scenario)
    return min(truth, max(first_order(scenario), 0.9 * truth))
