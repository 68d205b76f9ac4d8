"""The same failures under other policies, second by second."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import Cause, ConfigError
from slurm_resilience.observe.failures import Failure, Trace
from slurm_resilience.plan.ettr import exact
from slurm_resilience.plan.replay import Policy, ours, replay, stock
from slurm_resilience.plan.scenario import DAY_S, Scenario
from slurm_resilience.plan.trace import read_csv

PLAIN = Policy(interval_s=100, save_s=10, start_s=20, queue_s=30)
INSIDE = Policy(100, 10, 20, 30, relaunch_s=5, inside=frozenset({"rank_crash", "node_lost"}), detect_s={"node_lost": 2})


def test_one_failure_by_hand() -> None:
    """20 s start, 110 + 110 + 60 s of training, at 300 a crash; 30 s queue, 20 s start, then 150 s to the end."""
    ledger = replay(Trace((Failure(300.0, "rank_crash"),), 500.0), PLAIN)
    assert ledger.productive_s == 200 + 100 + 40
    assert ledger.saving_s == 20 + 10
    assert ledger.lost_s == 60
    assert ledger.restart_s == 40
    assert ledger.queued_s == 30
    assert (ledger.failures, ledger.requeues) == (1, 1)


def test_inside_the_allocation_there_is_no_queue_but_detection() -> None:
    ledger = replay(Trace((Failure(300.0, "node_lost"),), 500.0), INSIDE, nodes=4)
    assert (ledger.queued_s, ledger.requeues) == (0, 0)
    assert ledger.restart_s == 20 + 2 + 5
    after = 500 - 307
    done = 100 + (after - 110)
    assert ledger.reduced_s == pytest.approx(done / 4)
    assert ledger.productive_s == pytest.approx(200 + done * 3 / 4)


def test_a_spare_replaces_a_node_and_the_minimum_forces_a_requeue() -> None:
    trace = Trace((Failure(300.0, "node_lost"), Failure(600.0, "node_lost")), 900.0)
    spare = replay(trace, dataclasses.replace(INSIDE, spares=2), nodes=4)
    assert (spare.reduced_s, spare.requeues) == (0, 0)
    assert replay(trace, dataclasses.replace(INSIDE, spares=1), nodes=4).reduced_s > 0
    forced = replay(trace, dataclasses.replace(INSIDE, min_nodes=3), nodes=4)
    assert forced.requeues == 1
    again = replay(
        Trace((*trace.failures, Failure(700.0, "node_lost")), 900.0), dataclasses.replace(INSIDE, min_nodes=3), nodes=4
    )
    assert again.requeues == 1  # after the requeue all four nodes are there again, so one may be lost
    back = replay(trace, dataclasses.replace(INSIDE, min_nodes=3, repair_s=250.0), nodes=4)
    assert back.requeues == 0


def test_a_failure_in_the_queue_is_somebody_elses_and_one_in_a_restart_starts_it_again() -> None:
    queue = replay(Trace((Failure(100.0, "rank_crash"), Failure(120.0, "rank_crash")), 400.0), PLAIN)
    assert (queue.failures, queue.queued_s) == (1, 30)
    restart = replay(Trace((Failure(100.0, "rank_crash"), Failure(140.0, "rank_crash")), 400.0), PLAIN)
    assert (restart.failures, restart.queued_s, restart.restart_s) == (2, 60, 20 + 10 + 20)


def test_an_announced_end_loses_nothing_when_it_is_used() -> None:
    trace = Trace((Failure(300.0, "preemption"),), 500.0)
    careless = stock(interval_s=100, save_s=10, start_s=20, queue_s=30)
    careful = ours(interval_s=100, save_s=10, start_s=20, queue_s=30, relaunch_s=5)
    assert replay(trace, careless).lost_s == 60
    assert replay(trace, careful).lost_s == 0
    assert replay(trace, careful).requeues == 1


failures = st.lists(
    st.builds(Failure, st.floats(0, 5000), st.sampled_from([cause.value for cause in Cause]), st.just("n")), max_size=30
)


@given(
    failures,
    st.builds(
        Policy,
        interval_s=st.floats(1, 500),
        save_s=st.floats(0, 50),
        start_s=st.floats(0, 200),
        queue_s=st.floats(0, 500),
        relaunch_s=st.floats(0, 50),
        detect_s=st.just({"node_lost": 12.0, "hang": 60.0}),
        inside=st.sets(st.sampled_from([cause.value for cause in Cause])).map(frozenset),
        saves_on_warning=st.booleans(),
        spares=st.integers(0, 3),
        repair_s=st.floats(0, 1000),
        min_nodes=st.integers(1, 4),
    ),
    st.integers(4, 8),
)
def test_every_second_is_in_one_account(found: list[Failure], policy: Policy, nodes: int) -> None:
    trace = Trace(tuple(sorted(found, key=lambda failure: failure.at_s)), 5000.0)
    ledger = replay(trace, policy, nodes=nodes)
    assert abs(ledger.unaccounted_s) < 1e-6
    parts = (ledger.productive_s, ledger.saving_s, ledger.lost_s, ledger.restart_s, ledger.queued_s, ledger.reduced_s)
    assert min(parts) >= -1e-9
    assert ledger.requeues <= ledger.failures <= len(found)


def test_a_random_trace_agrees_with_the_exact_form() -> None:
    """Failures while the job is in the queue are dropped by the replay, as the exact form assumes."""
    scenario = Scenario(nodes=1000, rate=6.5e-3, interval_s=1800, save_s=60, restart_s=300, queue_s=0)
    draw, at, found = random.Random(1), 0.0, []
    while at < 3000 * DAY_S:
        at += draw.expovariate(scenario.failures_per_s)
        found.append(Failure(at, "rank_crash"))
    policy = Policy(scenario.interval_s, scenario.save_s, scenario.restart_s, scenario.queue_s)
    assert replay(Trace(tuple(found), at), policy).ettr == pytest.approx(exact(scenario), rel=0.01)


def test_csv_with_units_bounds_and_other_columns() -> None:
    trace = read_csv(["# a comment", "node, t_h ,cause,gpu", "a,1,node_lost,x", ",0,start,", "b,0.5,,y", ",3,end,"])
    assert trace == Trace((Failure(1800.0, "node_lost", "b"), Failure(3600.0, "node_lost", "a")), 10_800.0)


def test_csv_with_wall_clock_times() -> None:
    trace = read_csv(["time,cause", "2026-03-01T00:00:00Z,start", "2026-03-01T02:00:00+01:00,hang", "2026-03-01T03:00:00,end"])
    assert trace == Trace((Failure(3600.0, "hang"),), 10_800.0)
    assert read_csv(["time", "2026-03-01T00:00:00", "2026-03-01T01:00:00"]).length_s == 3600.0


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no column with times"),
        (["t_s,t_h", "3600,2"], "several columns with times"),
        (["t_h,t_h", "1,2"], "several columns with times"),
        (["when,cause", "1,hang"], "when, cause"),
        (["t_s", "soon"], "'soon' in line 2"),
        (["t_s", "nan"], "'nan'"),
        (["t_s,cause", "1,hnag"], "did you mean 'hang'"),
        (["t_s"], "no rows"),
        (["t_s,cause", "-5,hang", "4,hang"], "outside of the time"),
        (["t_s,cause", "5,hang", "4,end"], "outside of the time"),
        (["t_s", "0"], "covers none"),
    ],
)
def test_bad_traces_are_refused_with_the_line(lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_csv(lines)


def test_nonsense_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="negative"):
        Policy(100, -1, 0, 0)
    with pytest.raises(ConfigError, match="makes no sense"):
        Policy(0, 0, 0, 0)
