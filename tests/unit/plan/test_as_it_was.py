"""A run replayed by its own figures gives the ETTR that was measured: real runs, and any run that could have been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.cli import main
from slurm_resilience.observe.accounts import Measured, account
from slurm_resilience.observe.failures import Failure, Trace
from slurm_resilience.plan.as_it_was import as_it_was
from tests.unit.observe import recordings
from tests.unit.observe.test_accounts import FakeRun, trouble


@pytest.mark.parametrize("name", recordings.ALL)
def test_a_real_run_is_replayed_within_two_percent(name: str) -> None:
    found = account(recordings.events(name))
    replayed = as_it_was(found.trace, found.measured)
    assert replayed.ledger.ettr == pytest.approx(found.ledger.ettr, rel=0.005), "2 % are promised"
    assert abs(replayed.ledger.unaccounted_s) < 1e-6
    assert replayed.assumed == {}, "all that was needed had been seen"
    assert 0.2 < found.ledger.ettr < 0.9, "a run of which nothing was lost would prove nothing"


@pytest.mark.parametrize(
    ("name", "failures", "moves", "ended", "requeues"),
    [
        ("quiet", [], 0, False, 0),
        ("two_crashes", ["rank_crash", "rank_crash"], 0, False, 0),
        ("supervisor_killed", ["supervisor_lost"], 0, False, 0),  # the second time all ranks had gone on
        ("requeued", ["unknown"], 0, False, 1),
        ("shrunk_and_grown", ["node_lost"], 1, False, 0),
        ("sigterm", [], 0, True, 0),
        ("scancel", [], 0, True, 0),
    ],
)
def test_what_stopped_a_real_run(name: str, failures: list[str], moves: int, ended: bool, requeues: int) -> None:
    trace = account(recordings.events(name)).trace
    assert [failure.cause for failure in trace.failures] == failures
    assert (len(trace.moves), trace.ending is not None) == (moves, ended)
    assert sum(bool(failure.requeued) for failure in trace.failures) == requeues


def test_what_each_kind_of_stop_cost_is_told_apart() -> None:
    crashed = account(recordings.events("two_crashes")).measured
    assert set(crashed.detect_s) == {"rank_crash"}
    assert crashed.detect_s["rank_crash"] < 0.1 < 1.0 < (crashed.relaunch_s or 0.0) < 5.0
    assert (crashed.queue_s, crashed.leave_s, crashed.start_s, crashed.move_s) == (None, None, None, None)
    moved = account(recordings.events("requeued")).measured
    assert moved.relaunch_s is None
    assert moved.queue_s == pytest.approx(6.8, abs=0.5)
    grown = account(recordings.events("shrunk_and_grown")).measured
    assert grown.detect_s["node_lost"] == pytest.approx(4.0, abs=0.1)
    assert grown.move_s is not None


@settings(deadline=None)
@given(trouble, st.integers(5, 40), st.integers(100, 400))
def test_any_run_is_replayed_within_two_percent(events: list[tuple[int, str]], every: int, total: int) -> None:
    run = FakeRun(every=every, total=total)
    run.launch(run.START_S)
    if not any(run.train(steps) or getattr(run, what)() for steps, what in events):
        run.train(10**9)
    found = account(run.events)
    assert as_it_was(found.trace, found.measured).ledger.ettr == pytest.approx(found.ledger.ettr, rel=0.02)


def test_what_was_never_seen_is_assumed_and_named() -> None:
    trace = Trace((Failure(100.0, "hang"), Failure(200.0, "preemption", requeued=True)), 1000.0)
    found = as_it_was(trace, Measured(first_start_s=10.0))
    assert found.assumed == {"detect_s:hang": 60.0, "relaunch_s": 60.0, "leave_s": 0.0, "queue_s": 40.0, "start_s": 300.0}
    assert abs(found.ledger.unaccounted_s) < 1e-9


def test_the_command_replays_and_names_what_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.folder("two_crashes", tmp_path / "run")
    assert main(["plan", "replay", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["policies"]["as_it_was"]["ettr"] == pytest.approx(document["ettr"], rel=0.02)
    assert set(document["assumed_s"]) == {"queue_s", "stock_queue_s"}
    assert main(["plan", "replay", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "2 failures in" in said
    assert "Assumed, since the run did not show it: stock Slurm's queue 2.13 min, our queue 40 s" in said
