"""Published points, the exact form, the simulation: they agree where they should, and we know where they do not."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import ConfigError
from slurm_resilience.plan.ettr import estimate, exact, first_order
from slurm_resilience.plan.interval import best_s, daly_s, young_s
from slurm_resilience.plan.scenario import DAY_S, RATES, Scenario, parse_rate
from slurm_resilience.plan.simulation import simulate


def plan(nodes: int, rate: float, interval: float | None, restart: float, queue: float = 0.0, save: float = 0.0) -> Scenario:
    """Times in minutes; Young's interval where none is given."""
    every = young_s(save * 60, DAY_S / (nodes * rate)) if interval is None else interval * 60
    return Scenario(nodes, rate, every, save * 60, restart * 60, queue * 60)


# name -> scenario, published value, tolerance.  Source: Kokolis et al. (K), Llama 3 (L).
PUBLISHED = {
    "K1": (plan(2000, 6.5e-3, 60, 5), 0.70, 0.02),
    "K2": (plan(2000, 6.5e-3, 5, 5), 0.93, 0.01),
    "K3": (plan(1000, 6.5e-3, 30, 5, queue=1), 0.90, 0.015),
    "K6": (plan(1500, 1e-3, None, 5, save=5), 0.90, 0.01),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_points(name: str) -> None:
    scenario, published, tolerance = PUBLISHED[name]
    assert estimate(scenario) == pytest.approx(published, abs=tolerance)


def test_k1_lies_between_the_forms() -> None:
    """The first-order form is too low and the exact form, at the edge of the tolerance, too high by about the same."""
    scenario = PUBLISHED["K1"][0]
    assert first_order(scenario) == pytest.approx(0.684, abs=5e-4)
    assert exact(scenario) == pytest.approx(0.720, abs=5e-4)


@pytest.mark.parametrize("nodes", [256, 512])
def test_k4_measured_above_nine_tenths(nodes: int) -> None:
    for form in (first_order, exact, estimate):
        assert form(plan(nodes, 6.5e-3, 60, 5)) > 0.9


@pytest.mark.parametrize("form", [first_order, exact, estimate])
def test_k5_five_and_ten_minutes_bracket_nine_tenths(form) -> None:
    fast, slow = plan(1500, 6.5e-3, None, 5, save=1 / 6), plan(1500, 6.5e-3, None, 10, save=1 / 6)
    assert fast.interval_s / 60 == pytest.approx(7.0, abs=0.05)
    assert form(slow) < 0.9 < form(fast)


def test_k7_the_baseline_fails() -> None:
    scenario = plan(1500, 6.5e-3, None, 5, save=5)
    assert scenario.interval_s / 60 == pytest.approx(38.4, abs=0.05)
    assert estimate(scenario) < 0.8
    assert first_order(scenario) == pytest.approx(0.740, abs=5e-4)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_k8_mean_time_to_failure(gpus: int, hours: float) -> None:
    found = plan(gpus // 8, 6.5e-3, 60, 5).mttf_s / 3600
    assert found == pytest.approx(hours, rel=0.02) or round(found, 2) == hours
    assert plan(12_500, 6.5e-3, 60, 5).mttf_s / 60 == pytest.approx(17.7, rel=0.02)


def test_l1_llama_is_consistent_with_restarts_up_to_ten_minutes() -> None:
    by_restart = {minutes: plan(2048, 3.79e-3, None, minutes, save=1 / 6) for minutes in (5, 10, 20)}
    assert by_restart[5].interval_s / 60 == pytest.approx(7.9, abs=0.05)
    for form in (first_order, exact, estimate):
        assert form(by_restart[5]) > 0.90
        assert form(by_restart[10]) > 0.90
        assert form(by_restart[20]) < 0.90


def test_l2_gpu_days_per_failure() -> None:
    assert plan(1024 // 8, 8 / 3748, 60, 5).mttf_s / DAY_S == pytest.approx(3.66, abs=0.005)


@pytest.mark.parametrize("scenario", [scenario for scenario, _, _ in PUBLISHED.values()] + [plan(12_500, 20e-3, 7, 5)])
def test_the_simulation_agrees_with_the_exact_form(scenario: Scenario) -> None:
    assert simulate(scenario).ettr == pytest.approx(exact(scenario), rel=0.01)


scenarios = st.builds(
    Scenario,
    nodes=st.integers(1, 12_500),
    rate=st.floats(1e-4, 20e-3),
    interval_s=st.floats(60, 7200),
    save_s=st.floats(0, 600),
    restart_s=st.floats(0, 1200),
    queue_s=st.floats(0, 3600),
)


@settings(max_examples=20, deadline=None)
@given(scenarios, st.integers(0, 2**32))
def test_any_simulation_conserves_time_and_agrees(scenario: Scenario, seed: int) -> None:
    ledger = simulate(scenario, seed=seed)
    assert abs(ledger.unaccounted_s) <= 1e-9 * ledger.wall_s
    if exact(scenario) > 0.05:  # below, hardly any interval is ever kept, and sampling alone is off by more
        assert ledger.ettr == pytest.approx(exact(scenario), rel=0.01)


@settings(max_examples=60, deadline=None)
@given(scenarios, st.sampled_from(["nodes", "rate", "restart_s", "queue_s"]))
def test_worse_is_never_better(scenario: Scenario, name: str) -> None:
    worse = dataclasses.replace(scenario, **{name: getattr(scenario, name) * 2 or 60.0})
    assert exact(worse) <= exact(scenario)
    assert estimate(worse) <= estimate(scenario)
    assert first_order(worse) <= max(first_order(scenario), 0)
    assert simulate(worse, days=1, failures=200_000).ettr <= simulate(scenario, days=1, failures=200_000).ettr + 1e-9


@given(scenarios)
def test_the_estimate_stays_between_a_tenth_below_the_exact_form_and_the_exact_form(scenario: Scenario) -> None:
    assert 0.9 * exact(scenario) <= estimate(scenario) <= exact(scenario)


def test_without_failures_only_saves_cost() -> None:
    scenario = plan(512, 0.0, 60, 5, queue=10, save=6)
    for form in (first_order, exact, estimate):
        assert form(scenario) == pytest.approx(1 / (1 + 6 / 60), abs=1e-12)
    ledger = simulate(scenario)
    assert ledger.ettr == pytest.approx(1 / 1.1, rel=1e-9)
    assert ledger.unaccounted_s == pytest.approx(0, abs=1e-6)


@given(st.floats(1, 600), st.floats(2, 400))
def test_the_optimum_is_near_young_and_daly(save_s: float, ratio: float) -> None:
    mttf_s = save_s * ratio
    best = best_s(save_s, mttf_s)
    if ratio >= 20:  # where the rules, first order in w/M, are meant to hold
        assert daly_s(save_s, mttf_s) == pytest.approx(best, rel=0.10)
    if ratio >= 50:
        assert young_s(save_s, mttf_s) == pytest.approx(best, rel=0.10)
    scenario = Scenario(1, DAY_S / mttf_s, best, save_s, 120.0, 30.0)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert exact(dataclasses.replace(scenario, interval_s=best * factor)) <= exact(scenario) * (1 + 1e-12)


def test_the_simulated_optimum_is_near_daly() -> None:
    scenario = plan(1500, 6.5e-3, 30, 5, save=1)
    grid = [60.0 * 1.05**power for power in range(30, 80)]
    best = max(grid, key=lambda every: simulate(dataclasses.replace(scenario, interval_s=every), failures=400_000).ettr)
    assert best == pytest.approx(daly_s(60, scenario.mttf_s), rel=0.10)


def test_bursts_cost_more_than_memoryless_failures() -> None:
    scenario = plan(1000, 6.5e-3, 30, 5)
    bursty = simulate(scenario, shape=0.7, days=60)
    assert bursty.ettr < simulate(scenario).ettr
    assert abs(bursty.unaccounted_s) <= 1e-9 * bursty.wall_s


def test_the_shape_does_not_change_the_rate_in_the_long_run() -> None:
    """Over few node lives the fresh nodes' early failures count more; over hundreds of them only the mean does."""
    scenario = plan(10, 20e-3, 30, 5)
    ledger = simulate(scenario, shape=0.7, days=40_000)
    assert ledger.failures / ledger.wall_s == pytest.approx(scenario.failures_per_s, rel=0.02)


def test_weibull_of_shape_near_one_is_the_exponential() -> None:
    scenario = plan(1000, 6.5e-3, 30, 5)
    assert simulate(scenario, shape=1.0001).ettr == pytest.approx(exact(scenario), rel=0.01)
    few = plan(4, 2e-3, 30, 5)
    assert simulate(few, shape=1.0001).ettr == pytest.approx(exact(few), rel=0.01)


def test_a_hundred_thousand_gpus_for_a_year_in_seconds() -> None:
    before = time.process_time()
    ledger = simulate(plan(12_500, RATES["bad"], 7, 5), days=365)
    assert ledger.failures >= 12_500 * RATES["bad"] * 365
    simulate(plan(12_500, RATES["bad"], 7, 5), days=365, shape=0.7)
    assert time.process_time() - before < 10


@pytest.mark.parametrize(
    ("text", "rate"),
    [("good", 2e-3), ("typical", 6.5e-3), ("bad", 20e-3), ("6.5e-3", 6.5e-3), ("6.5", 6.5e-3), ("2", 2e-3), ("0", 0)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["goood", "-1", "nan", "inf", ""])
def test_nonsense_rates_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rate(text)
    with pytest.raises(ConfigError, match="did you mean 'good'"):
        parse_rate("goood")


def test_nonsense_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="interval of 0"):
        Scenario(1, 1e-3, 0.0)
    with pytest.raises(ConfigError, match="restart_s=-1"):
        Scenario(1, 1e-3, 60.0, restart_s=-1)
    with pytest.raises(ConfigError, match="at least one node"):
        Scenario(0, 1e-3, 60.0)
    with pytest.raises(ConfigError, match="a save costs nothing"):
        best_s(0.0, 1000.0)
    with pytest.raises(ConfigError, match="nothing ever fails"):
        best_s(60.0, float("inf"))
    with pytest.raises(ConfigError, match="above zero"):
        simulate(Scenario(1, 1e-3, 60.0), shape=0)
