"""The chosen interval is the one that loses least, within its bounds, and says why."""

from __future__ import annotations

import pytest

from slurm_resilience.plan.cadence import DAY_S, PRIOR_PER_NODE_DAY, choose, mtbf_s
from slurm_resilience.plan.interval import best_s


def test_before_any_failure_the_published_rate_counts_and_afterwards_the_runs_own() -> None:
    assert mtbf_s(nodes=1, observed_s=0, failures=0) == pytest.approx(DAY_S / PRIOR_PER_NODE_DAY)
    assert mtbf_s(nodes=100, observed_s=0, failures=0) == pytest.approx(DAY_S / PRIOR_PER_NODE_DAY / 100)
    often = mtbf_s(nodes=100, observed_s=10 * DAY_S, failures=100)
    assert often == pytest.approx(DAY_S / 10, rel=0.2)
    assert mtbf_s(nodes=100, observed_s=100 * DAY_S, failures=0) > mtbf_s(nodes=100, observed_s=0, failures=0)


@pytest.mark.parametrize(
    ("given_", "interval", "says"),
    [
        ({"stall_s": 1.0, "nodes": 128, "observed_s": 0, "failures": 0}, 456, "best is"),
        ({"stall_s": 0.001, "nodes": 1000, "observed_s": 0, "failures": 0}, 30, "shortest allowed"),
        ({"stall_s": 0.01, "nodes": 1000, "observed_s": 0, "failures": 0, "write_s": 100.0}, 120, "is written"),
        ({"stall_s": 60.0, "nodes": 1000, "observed_s": 3600, "failures": 50}, 540, "a tenth"),
        ({"stall_s": 60.0, "nodes": 1, "observed_s": 0, "failures": 0}, 3600, "longest allowed"),
    ],
)
def test_the_choice_is_bounded_and_gives_its_reason(given_: dict[str, float], interval: float, says: str) -> None:
    choice = choose(**given_)  # type: ignore[arg-type]
    assert choice.interval_s == pytest.approx(interval, rel=0.02)
    assert says in choice.reason
    assert f"{given_['failures']} failures" in choice.reason


def test_between_its_bounds_the_choice_is_the_exact_optimum() -> None:
    choice = choose(stall_s=2.0, nodes=64, observed_s=3 * DAY_S, failures=4)
    assert choice.interval_s == best_s(2.0, mtbf_s(nodes=64, observed_s=3 * DAY_S, failures=4))
