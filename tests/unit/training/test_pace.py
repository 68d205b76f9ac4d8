"""When the next checkpoint is due, and why, is said by the run itself."""

from __future__ import annotations

import math

import pytest

from slurm_resilience.plan.cadence import choose
from slurm_resilience.training import pace as module
from slurm_resilience.training.pace import Pace, Past


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_fixed_minutes_count_from_the_last_save(time: Time) -> None:
    pace = Pace(2.0)
    time.now += 119
    assert not pace.due()
    time.now += 1
    assert pace.due()
    pace.saved()
    assert not pace.due()
    pace.measured(50.0, 500.0)
    assert pace.interval_s == 120


def test_without_minutes_none_is_ever_due(time: Time) -> None:
    time.now += 1e12
    assert not Pace(None).due()


def test_auto_learns_the_cost_first_and_then_takes_the_optimum_with_its_reason(time: Time) -> None:
    said: list[tuple[float, str]] = []
    past = Past(nodes=256, observed_s=86_400.0, failures=4)
    pace = Pace("auto", bounds_min=(0.5, 60), past=past, tell=lambda interval_s, reason: said.append((interval_s, reason)))
    assert said == [(30.0, "what a save costs is not known yet: the shortest allowed, to learn it")]
    time.now += 30
    assert pace.due()
    pace.saved()
    pace.measured(2.0, 20.0)
    best = choose(stall_s=2.0, write_s=20.0, nodes=256, observed_s=86_430.0, failures=4)
    assert said[1:] == [(best.interval_s, best.reason)]
    assert 30 < pace.interval_s < 3600
    assert "4 failures" in best.reason
    pace.measured(2.1, 20.0)
    assert len(said) == 2  # the optimum is flat
    for _ in range(5):
        pace.measured(20.0, 20.0)
    assert len(said) > 2
    assert pace.interval_s > 2 * best.interval_s


@pytest.mark.parametrize(("stall_s", "interval_s"), [(1e-9, 30), (300.0, 3600)])
def test_auto_keeps_its_bounds(time: Time, stall_s: float, interval_s: float) -> None:
    pace = Pace("auto", bounds_min=(0.5, 60), past=Past(nodes=1 if stall_s > 1 else 4000))
    pace.measured(stall_s, 0.0)
    assert math.isclose(pace.interval_s, interval_s)
