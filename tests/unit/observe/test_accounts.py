"""A run's own events give the run's measured ETTR, also when supervisors die and checkpoints are rolled back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import ConfigError
from slurm_resilience.observe.accounts import account


class FakeRun:
    """A run as its ranks live it, second by second; it writes the events that the real one writes."""

    STEP_S, SAVE_S, DETECT_S, RELAUNCH_S, START_S, QUEUE_S = 2.0, 3.0, 1.0, 4.0, 15.0, 40.0

    def __init__(self, *, every: int, total: int, tells_start: bool = True) -> None:
        self.t = 1000.0
        self.tells_start = tells_start
        self.every, self.total = every, total
        self.events: list[dict[str, Any]] = []
        self.step = self.attempt = 0
        self.committed = [0]
        self.kept_s = self.saving_s = self.lost_s = self.queued_s = 0.0
        self.write("run_started")
        self.write("allocation_started", nodes=["a", "b"])

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "t": self.t, "attempt": self.attempt, **fields})

    def launch(self, seconds: float) -> None:
        self.attempt += 1
        self.write("attempt_started", nodes=["a", "b"])
        self.t += seconds
        lost = (self.step - self.committed[-1]) * self.STEP_S
        self.lost_s += lost
        self.kept_s -= lost
        self.step = self.committed[-1]
        self.first = True
        self.write("ranks_launched")

    def train(self, steps: int) -> bool:
        """True when the run is complete."""
        for _ in range(steps):
            self.t += self.STEP_S
            self.kept_s += self.STEP_S
            self.step += 1
            self.write("step_reported", step=self.step)
            if self.first:  # the supervisor hears the slowest rank last
                begun = self.step - 1
                self.write("resumed", step=begun) if begun else self.write("started_fresh")
                self.write("first_step", step=self.step)
                self.first = False
            if self.step % self.every == 0 or self.step == self.total:
                self.save()
            if self.step == self.total:
                self.write("finished", step=self.step)
                self.write("run_completed", step=self.step)
                return True
        return False

    def save(self) -> None:
        if self.committed[-1] == self.step:
            return
        if self.tells_start:
            self.write("checkpoint_started", step=self.step)
        self.t += self.SAVE_S
        self.saving_s += self.SAVE_S
        self.write("checkpoint_committed", step=self.step, seconds=self.SAVE_S)
        self.committed.append(self.step)

    def crash(self) -> None:
        since = self.t
        self.t += self.DETECT_S
        self.write("fault_detected", cause="rank_crash", node="a", since=since)
        self.write("attempt_stopped", cause="rank_crash")
        self.write("step_reported", step=self.step)  # its last words, read from a socket after the end
        self.launch(self.RELAUNCH_S)

    def preempt(self) -> None:
        self.write("warning_received", signal="SIGTERM")
        self.write("warning_explained", cause="preemption")
        self.save()
        self.write("stopped", step=self.step, why="preemption")
        self.write("attempt_stopped", cause="preemption", fault=False)
        self.write("requeue_started")
        self.requeued()

    def batch_host_dies(self) -> None:
        """Nobody writes anything; Slurm requeues the job."""
        self.requeued()

    def requeued(self) -> None:
        self.t += self.QUEUE_S
        self.queued_s += self.QUEUE_S
        self.write("allocation_started", nodes=["a", "b"])
        self.launch(self.START_S)

    def rollback(self) -> None:
        """The newest checkpoint turns out to be bad after a crash."""
        if len(self.committed) > 1:
            self.committed.pop()
        self.crash()


trouble = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from(["crash", "preempt", "batch_host_dies", "rollback"])), max_size=8
)


@settings(deadline=None)
@given(trouble, st.integers(5, 40), st.integers(100, 400))
def test_the_account_is_what_the_run_lived(events: list[tuple[int, str]], every: int, total: int) -> None:
    run = FakeRun(every=every, total=total)
    run.launch(run.START_S)
    done = False
    for steps, what in events:
        done = run.train(steps)
        if done:
            break
        getattr(run, what)()
    if not done:
        run.train(10**9)
    found = account(run.events)
    assert found.complete
    wall = run.t - 1000.0
    assert found.ledger.wall_s == pytest.approx(wall)
    assert abs(found.ledger.unaccounted_s) < 1e-6
    assert found.ledger.productive_s == pytest.approx(run.kept_s, abs=1e-6) == run.total * run.STEP_S
    assert found.ledger.failures == run.attempt - 1
    assert found.ledger.ettr == pytest.approx(run.kept_s / wall, rel=0.02)
    assert found.ledger.lost_s == pytest.approx(run.lost_s, abs=1e-6)
    assert found.ledger.saving_s == pytest.approx(run.saving_s, abs=1e-6)
    assert found.ledger.queued_s == pytest.approx(run.queued_s, abs=1e-6)


def test_parameters_are_measured() -> None:
    run = FakeRun(every=10, total=100)
    run.launch(run.START_S)
    run.train(25)
    run.crash()
    run.train(25)
    run.preempt()
    run.train(100)
    found = account(run.events)
    assert found.measured.interval_s == pytest.approx(20.0)
    assert found.measured.save_s == pytest.approx(3.0)
    assert found.measured.start_s == pytest.approx(15.0)
    assert found.measured.detect_s == pytest.approx({"rank_crash": 1.0})
    assert found.measured.relaunch_s == pytest.approx(4.0)
    assert found.measured.first_start_s == pytest.approx(15.0)
    assert found.measured.queue_s == pytest.approx(40.0)
    assert [failure.cause for failure in found.trace.failures] == ["rank_crash", "preemption"]
    assert (found.nodes, found.ledger.requeues) == (2, 1)


def test_a_save_behind_the_steps_stops_nobody() -> None:
    events = [
        {"event": "run_started", "t": 0.0},
        {"event": "allocation_started", "t": 0.0},
        {"event": "attempt_started", "t": 0.0, "attempt": 1, "nodes": ["a"]},
        {"event": "first_step", "t": 12.0, "attempt": 1, "step": 1},
        {"event": "step_reported", "t": 14.0, "attempt": 1, "step": 2},
        {"event": "checkpoint_started", "t": 14.0, "attempt": 1, "step": 2},
        {"event": "step_reported", "t": 16.0, "attempt": 1, "step": 3},
        {"event": "checkpoint_committed", "t": 17.0, "attempt": 1, "step": 2},
        {"event": "step_reported", "t": 18.0, "attempt": 1, "step": 4},
    ]
    found = account(events)
    assert (found.ledger.saving_s, found.ledger.productive_s, found.ledger.restart_s) == (0, 8, 10)
    assert not found.complete


def test_a_save_says_for_how_long_training_stood() -> None:
    """One is written behind two steps, the next one waits for it, and is not complete when the attempt ends."""
    run = FakeRun(every=10**9, total=100)
    run.launch(run.START_S)
    run.train(10)
    run.write("checkpoint_started", step=10)
    run.t += 0.5
    run.train(2)
    run.write("checkpoint_started", step=12)
    run.t += 3.0
    run.write("checkpoint_committed", step=10, seconds=7.5, stall_s=0.5)
    run.t += 0.25
    run.train(1)
    run.write("checkpoint_committed", step=12, seconds=5.25, stall_s=3.25)
    run.committed.append(12)
    run.crash()
    run.train(1)
    found = account(run.events)
    assert found.ledger.saving_s == pytest.approx(3.75)
    assert found.ledger.productive_s == pytest.approx(13 * run.STEP_S)
    assert found.ledger.lost_s == pytest.approx(1 * run.STEP_S)
    assert found.measured.save_s == pytest.approx((0.5 + 3.25) / 2)


def test_a_resume_from_memory_loses_only_what_came_after_the_copy() -> None:
    run = FakeRun(every=10, total=100)
    run.launch(run.START_S)
    run.train(27)
    run.committed.append(25)  # a copy that no event told of
    run.crash()
    run.train(1)
    found = account(run.events)
    assert found.ledger.lost_s == pytest.approx(2 * run.STEP_S)
    assert found.ledger.productive_s == pytest.approx(26 * run.STEP_S)


def test_a_run_that_failed_keeps_only_what_it_saved() -> None:
    run = FakeRun(every=10, total=100)
    run.launch(run.START_S)
    run.train(25)
    run.write("fault_detected", cause="app_error", since=run.t)
    run.write("run_failed", cause="app_error")
    found = account(run.events)
    assert (found.complete, found.ledger.productive_s, found.ledger.lost_s) == (True, 40.0, 10.0)


def test_ranks_that_outlive_their_supervisor_train_on() -> None:
    run = FakeRun(every=10, total=100)
    run.launch(run.START_S)
    run.train(25)
    run.write("supervisor_restarted")
    run.write("attempt_adopted", world=2)
    run.train(100)
    found = account(run.events)
    assert (found.ledger.failures, found.ledger.productive_s, found.ledger.lost_s) == (0, 200.0, 0.0)


@pytest.mark.parametrize("said", ["attempt_stopped", "nothing"])
def test_ranks_that_died_with_their_supervisor_ended_at_their_last_step(said: str) -> None:
    run = FakeRun(every=10, total=100)
    run.launch(run.START_S)
    run.train(25)
    run.t += 6.0
    run.write("supervisor_restarted")
    if said == "attempt_stopped":
        run.write("attempt_stopped", cause="restart")
    run.launch(run.RELAUNCH_S)
    run.train(100)
    found = account(run.events)
    assert (found.ledger.failures, found.ledger.productive_s, found.ledger.lost_s) == (1, 200.0, 10.0)
    assert found.ledger.restart_s == pytest.approx(run.START_S + 6.0 + run.RELAUNCH_S)
    assert abs(found.ledger.unaccounted_s) < 1e-6


def test_steps_after_the_beginning_of_a_fault_prove_that_training_went_on() -> None:
    """A silent node is dated back to its last sign of life; the others stepped on until they were stopped."""
    run = FakeRun(every=10, total=100)
    run.launch(run.START_S)
    run.train(25)
    run.write("fault_detected", cause="node_lost", since=run.t - 7.0)
    run.launch(run.RELAUNCH_S)
    run.train(100)
    found = account(run.events)
    assert (found.ledger.productive_s, found.ledger.lost_s) == (200.0, 10.0)


def test_a_script_that_tells_only_the_end_of_a_save() -> None:
    run = FakeRun(every=10, total=60, tells_start=False)
    run.launch(run.START_S)
    run.train(25)
    run.crash()
    run.train(60)
    found = account(run.events)
    assert (found.ledger.lost_s, found.ledger.productive_s, found.ledger.saving_s) == (10.0, 120.0, run.saving_s)


def test_no_events_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no events"):
        account([])
