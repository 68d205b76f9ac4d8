"""The checker itself: a good history passes, and each kind of broken one is named."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest

from tests.faults.checker import check
from tests.faults.history import Event, Fired, History

TOTAL, EVERY = 12, 4


def good() -> History:
    """A rank was killed at step 6; the second attempt went on from step 4 on one node less."""
    events: list[Event] = []

    def fact(attempt: int, event: str, t: float, **fields: object) -> None:
        events.append({"v": 1, "seq": len(events) + 1, "t": t, "restart": 0, "attempt": attempt, "event": event, **fields})

    plan = {"global_batch": 8, "samples_per_dp_rank": [2, 2, 2, 2]}
    fact(0, "run_started", 0.0)
    fact(1, "attempt_started", 1.0, plan=plan)
    fact(1, "started_fresh", 2.0)
    fact(1, "checkpoint_committed", 4.0, step=4, name="s4-a1")
    fact(1, "fault_detected", 6.1, cause="rank_crash", node="n2")
    fact(1, "attempt_stopped", 6.2)
    fact(2, "attempt_started", 6.3, plan={"global_batch": 8, "samples_per_dp_rank": [3, 3, 2]})
    fact(2, "resumed", 7.0, step=4)
    fact(2, "checkpoint_committed", 9.0, step=8, name="s8-a2")
    fact(2, "checkpoint_committed", 10.0, step=12, name="s12-a2")
    fact(2, "run_completed", 11.0, step=TOTAL)
    curve = [{"step": s, "attempt": 1, "world": 4, "loss": 1.0 / s} for s in range(1, 7)]
    curve += [{"step": s, "attempt": 2, "world": 3, "loss": (1.0 / s) * (1 + 1e-7)} for s in range(5, TOTAL + 1)]
    return History(
        events=events,
        curve=curve,
        state={"state": "complete"},
        checkpoints={"s8-a2": 8, "s12-a2": 12},
        faults=[Fired("rank", "n2", 77, 6.0, 6, "step 6", False)],
    )


def violations(history: History) -> list[str]:
    return check(history, total_steps=TOTAL, keep_last=2)


def test_a_good_history_passes() -> None:
    assert violations(good()) == []


def test_a_busy_machine_may_notice_late() -> None:
    history = good()
    history.of("fault_detected")[0]["t"] = 40.0
    assert violations(history) == []


def drop(kind: str) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.events = [event for event in history.events if event["event"] != kind]

    return change


def edit(kind: str, **fields: object) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.of(kind)[-1].update(fields)

    return change


def edit_curve(index: int, **fields: object) -> Callable[[History], None]:
    return lambda history: history.curve[index].update(fields)


BREAKS: dict[str, tuple[Callable[[History], None], str]] = {
    "unnoticed": (drop("fault_detected"), "left no fault_detected"),
    "noticed too late": (edit("fault_detected", t=60.0), "left no fault_detected"),
    "noticed after the next fault": (
        lambda history: (
            edit("fault_detected", t=30.0)(history),
            history.faults.append(dataclasses.replace(history.faults[0], t=29.5)),
        ),
        "left no fault_detected",
    ),
    "two writers": (edit("resumed", seq=2), "more than one writer"),
    "attempt number again": (edit("attempt_started", attempt=1), "attempt 1 started after attempt 1"),
    "checkpoint lost": (lambda history: history.checkpoints.pop("s12-a2"), "s12-a2 (step 12) was committed and is gone"),
    "checkpoint changed": (lambda history: history.checkpoints.update({"s12-a2": 11}), "now says step 11"),
    "resumed from before the last commit": (edit("resumed", step=0), "resumed at step 0 though step 4"),
    "started over": (lambda history: history.of("resumed")[0].update(event="started_fresh"), "started from nothing"),
    "a step twice in one attempt": (edit_curve(3, step=3), "reports step 3 after step 3"),
    "a step left out": (lambda history: history.curve.pop(), "steps [12] were never taken"),
    "another loss on replay": (edit_curve(6, loss=0.3), "step 5: loss"),
    "nan on replay": (edit_curve(6, loss=float("nan")), "step 5: loss"),
    "a leftover trains": (edit_curve(-1, attempt=1, step=7), "attempt 1 took step 7 after attempt 2"),
    "batch changed": (edit("attempt_started", plan={"global_batch": 6}), "global batch changed"),
    "samples lost": (edit("attempt_started", plan={"global_batch": 8, "samples_per_dp_rank": [2, 2, 2]}), "splits 8"),
    "a leftover commits": (edit("checkpoint_committed", attempt=1), "committed step 12 after attempt 2 had started"),
    "two attempts at once": (lambda history: history.overlaps.append("attempt 1 beside 2"), "attempt 1 beside 2"),
    "somebody left alive": (lambda history: history.left_alive.append("rank 3"), "left alive at the end: rank 3"),
    "never finished": (drop("run_completed"), "0 run_completed"),
    "finished early": (edit("run_completed", step=11), "completed at step 11 of 12"),
    "state disagrees": (lambda history: history.state.update(state="failed"), "state.json says"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_history_is_named(name: str) -> None:
    history = copy.deepcopy(good())
    change, words = BREAKS[name]
    change(history)
    found = violations(history)
    assert any(words in sentence for sentence in found), found
