"""What the demo calls OK, and what it must not: its last line is a claim about numbers that it computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "demo"
sys.path.insert(0, str(DEMO))
try:
    import curves
    from record import Record
    from story import Result, last_line, verdict
finally:
    sys.path.remove(str(DEMO))

STEPS = 100


def good(**changes: object) -> Result:
    values = {
        "node": "n4", "lost_s": 4.2, "preempted_s": 20.0, "restarts": [0, 0, 1], "batches": [48, 48, 48],
        "difference": 1e-7, "final_difference": 1e-7, "steps": STEPS,
    }  # fmt: skip
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_a_good_result_is_ok_and_its_line_has_its_numbers() -> None:
    assert verdict(good(), STEPS) == []
    line = last_line(good())
    assert line.startswith("DEMO OK  n4 lost -> first step on 3 nodes 4.2 s (restart count 0 -> 0)")
    assert "100 steps, global batch 48/48/48" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"restarts": [0, 1, 2]}, "losing a node cost a requeue"),
        ({"restarts": [0, 0, 0]}, "should have cost one requeue"),
        ({"restarts": [0, 0, 2]}, "should have cost one requeue"),
        ({"lost_s": 30.1}, "30.1 s from power-off"),
        ({"batches": [48, 36, 48]}, "global batch changed"),
        ({"batches": []}, "global batch changed"),
        ({"steps": 99}, "99 of 100 steps"),
        ({"final_difference": 2e-4}, "final loss differs by 2.0e-04"),
        ({"final_difference": float("nan")}, "final loss differs by nan"),
    ],
)
def test_each_broken_promise_is_named(changes: dict[str, object], words: str) -> None:
    assert any(words in sentence for sentence in verdict(good(**changes), STEPS))


def test_the_newest_attempt_counts_on_the_curve(tmp_path: Path) -> None:
    lines = [(1, 1, 5.0), (2, 1, 4.0), (3, 1, 9.9), (2, 2, 4.5), (3, 2, 3.0)]
    text = "".join(json.dumps({"step": step, "attempt": attempt, "loss": loss}) + "\n" for step, attempt, loss in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "att')
    assert curves.read_curve(tmp_path) == {1: 5.0, 2: 4.5, 3: 3.0}


def test_the_largest_difference_and_curves_that_do_not_match() -> None:
    assert curves.largest_difference({1: 2.0, 2: 1.1}, {1: 2.0, 2: 1.0}) == (pytest.approx(0.1), 2)
    assert curves.largest_difference({1: 2.0}, {1: 2.0, 2: 1.0}) == (float("inf"), 2)
    assert curves.largest_difference({}, {})[0] == float("inf")
    shown = curves.side_by_side({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}, {2: "first step again"})
    assert shown[-1].endswith("first step again")


def test_a_failed_run_that_was_started_again_has_not_failed(tmp_path: Path) -> None:
    events = [{"event": "run_failed", "cause": "preemption", "reason": "told to go"}]
    (tmp_path / "events.jsonl").write_text(json.dumps(events[0]) + "\n")
    assert Record(tmp_path).failed() == "preemption: told to go"
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in [*events, {"event": "allocation_started"}])
    )
    assert Record(tmp_path).failed() is None
