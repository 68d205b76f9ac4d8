"""What the guard of the first steps condemns, and what it lets pass: numbers in, a verdict out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.training.guard import Band, Guard, Trouble
from slurm_resilience.training.metrics import Log, MetricsFile, history
from slurm_resilience.training.track import LENGTH, Rows, Track
from slurm_resilience.training.verifying import Verifying

LIMITS = Verifying()


def steady(last: int, loss: float = 2.0, norm: float = 0.5, first: int = 1) -> Rows:
    """Numbers that wobble by a percent, as those of a run do."""
    return {
        step: {"loss": loss * (1 + 0.01 * math.sin(step)), "grad_norm": norm * (1 + 0.1 * math.cos(step))}
        for step in range(first, last + 1)
    }


def guard(step: int = 100, before: Rows | None = None, logged: Rows | None = None, **options: Any) -> Guard:
    about = {"exact": True, "scaled": False, **options}
    return Guard(step, steady(step) if before is None else before, logged or {}, LIMITS, **about)


def first_trouble(one: Guard, *said: dict[str, Any], begin: int = 101) -> Trouble | None:
    found = (one.look(step, values) for step, values in enumerate(said, begin))
    return next((trouble for trouble in found if trouble is not None), None)


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_answered_at_once(metric: str, value: float) -> None:
    trouble = first_trouble(guard(before={}), {"loss": 2.0, "grad_norm": 0.5, metric: value})
    assert trouble is not None
    assert (trouble.metric, trouble.kind, trouble.step) == (metric, "not finite", 101)


def test_a_gradient_scaler_overflows_by_right() -> None:
    assert first_trouble(guard(scaled=True), {"loss": 2.0, "grad_norm": math.inf}) is None
    assert first_trouble(guard(scaled=True), {"loss": math.inf}) is not None


def test_one_spike_is_none_and_a_wrong_state_stays() -> None:
    spike = [{"loss": 9.0, "grad_norm": 90.0}] * 2 + [{"loss": 2.0, "grad_norm": 0.5}]
    assert first_trouble(guard(), *spike, *spike) is None
    trouble = first_trouble(guard(), *[{"loss": 9.0}] * 3)
    assert trouble is not None
    assert (trouble.kind, trouble.step) == ("outlier", 103)
    assert "3 times in a row" in str(trouble)
    trouble = first_trouble(guard(), *[{"loss": 2.0, "grad_norm": 90.0}] * 3)
    assert trouble is not None
    assert trouble.metric == "grad_norm"


def test_a_replayed_step_gives_what_its_log_says_where_random_numbers_go_on() -> None:
    logged = steady(110, first=101)
    same = [dict(logged[step]) for step in range(101, 111)]
    assert first_trouble(guard(logged=logged), *same) is None
    other = [{**same[0], "loss": same[0]["loss"] * 1.002}]
    trouble = first_trouble(guard(logged=logged), *other)
    assert trouble is not None
    assert (trouble.kind, trouble.step) == ("replay", 101)
    assert first_trouble(guard(logged=logged, exact=False), *other) is None
    later = [*same[:3], {**same[3], "loss": same[3]["loss"] * 1.002}]  # kernels that add in any order drift apart
    assert first_trouble(guard(logged=logged), *later) is None


def test_case_10_without_history_nothing_is_condemned_and_the_guard_says_what_it_could_not_tell() -> None:
    """Case 10: the first checkpoint ever has no history."""
    young = guard(step=4, before=steady(4))
    assert first_trouble(young, *[{"loss": 99.0}] * 5, begin=5) is None
    assert young.unseen() == ["loss has no history of 16 steps", "grad_norm was not reported"]
    seen = guard()
    assert first_trouble(seen, {"loss": 2.0, "grad_norm": 0.5}) is None
    assert seen.unseen() == []


def test_a_floor_keeps_a_flat_curve_from_crying_wolf() -> None:
    flat = {step: {"loss": 2.0} for step in range(1, 101)}
    assert first_trouble(guard(before=flat), *[{"loss": 2.3}] * 5) is None
    assert first_trouble(guard(before=flat), *[{"loss": 2.4}] * 5) is not None


def test_entries_since_the_incident_began_are_condemned() -> None:
    trouble = Trouble("loss", "outlier", 103, "", 9.0)
    assert guard().good_until(trouble) == 99  # nothing odd before: the entry of step 100 itself
    bad = {**steady(100), **{step: {"loss": 9.0} for step in range(91, 101)}}
    assert guard(before=bad).good_until(trouble) == 89  # step 91 was computed from what step 90 had left behind
    gone = {**steady(100), **{step: {"loss": math.nan} for step in range(96, 101)}}
    assert guard(before=gone).good_until(Trouble("loss", "not finite", 101, "", math.nan)) == 94


def test_it_does_not_go_back_twice_for_what_the_run_does_by_itself() -> None:
    spike = Trouble("loss", "outlier", 103, "", 9.0)
    assert guard(earlier=[spike]).excused(Trouble("loss", "outlier", 103, "", 9.1))
    assert not guard(earlier=[spike]).excused(Trouble("loss", "outlier", 93, "", 9.1))
    replay = Trouble("loss", "replay", 101, "", 9.0)
    assert guard(earlier=[replay]).excused(Trouble("loss", "replay", 91, "", 9.0))  # data that are not resumed, say
    assert guard(earlier=[spike, replay]).excused(Trouble("grad_norm", "outlier", 80, "", 9.0))


def test_the_band_does_not_follow_outliers() -> None:
    band = Band.of([1.0] * 20 + [100.0] * 9, floor=0.02, least=16)
    assert band is not None
    assert band.beyond(1.2, 8.0)
    assert not band.beyond(1.1, 8.0)
    assert Band.of([1.0] * 15 + [math.nan] * 50, floor=0.02, least=16) is None


def test_the_track_is_bounded_and_survives_json() -> None:
    track, again = Track(), Track()
    for step in range(LENGTH + 10):
        track.add(step, {"loss": math.nan if step == 40 else 1.0 * step, "lr": 3.0, "note": "x"})
    track.add(999, {"lr": 3.0})
    again.load(track.to_json())
    assert list(again.rows) == list(range(10, LENGTH + 10))
    assert again.rows[41] == {"loss": 41.0}
    assert math.isnan(again.rows[40]["loss"])


def write(run_dir: Path, attempt: int, *steps: int) -> MetricsFile:
    file = MetricsFile(run_dir)
    for step in steps:
        file.write({"step": step, "attempt": attempt, "loss": 10.0 * attempt + step})
    return file


def test_what_was_rolled_back_is_not_told_any_more_and_still_compared_with(tmp_path: Path) -> None:
    write(tmp_path, 1, 1, 2, 3, 4).remark("rolled_back", to=2)
    assert list(history(tmp_path)) == [1, 2]
    assert list(Log.read(tmp_path).taken) == [1, 2, 3, 4]
    write(tmp_path, 2, 3)
    assert {step: line["attempt"] for step, line in history(tmp_path).items()} == {1: 1, 2: 1, 3: 2}


def test_an_incident_is_forgotten_and_its_trouble_is_over_once_the_run_is_beyond_it(tmp_path: Path) -> None:
    trouble = Trouble("loss", "not finite", 4, "a number", math.nan)
    write(tmp_path, 1, 1, 2, 3, 4).remark("trouble", to=2, **trouble.to_json())
    log = Log.read(tmp_path, got_over_after=2)
    assert list(log.taken) == [1, 2]
    assert [str(Trouble.from_json(note)) for note in log.trouble] == [str(trouble)]
    write(tmp_path, 2, 3, 4, 5, 6)
    assert len(Log.read(tmp_path, got_over_after=2).trouble) == 1
    write(tmp_path, 2, 7)
    assert Log.read(tmp_path, got_over_after=2).trouble == []


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1, *range(1, 200))
    tail = Log.read(tmp_path, tail_bytes=1000)
    assert max(tail.newest) == 199
    assert 10 < len(tail.newest) < 40
