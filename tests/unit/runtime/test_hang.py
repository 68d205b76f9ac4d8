"""Which rank hangs, and from when on: the limits and how they are learned, at exact times."""

from __future__ import annotations

import math

import pytest

from slurm_resilience.config import LimitsConfig
from slurm_resilience.runtime.hang import Judge, Look, Section
from slurm_resilience.runtime.limits import START_STEP_S, Limits

FAST = {"step": (500, 0.11)}


def learned(**seen: tuple[int, float]) -> Limits:
    limits = Limits(LimitsConfig(), {})
    limits.note({"step": (500, 0.11), **seen})
    return limits


def look(
    *sections: tuple[str, float | None, float, float], step: int = 50, times: int = 50, quiet_s: float = 0.0, done: bool = False
) -> Look:
    return Look(step, 60, done, tuple(Section(*each, times) for each in sections), quiet_s)


def stepping(own_s: float, *, step: int = 50) -> Look:
    return look(("step", None, own_s, 1000.0), step=step)


def hang(limits: Limits, *ranks: Look, init_s: float = 600.0) -> int | None:
    found = Judge().find(dict(enumerate(ranks)), limits, init_s=init_s, now=1000.0)
    return None if found is None else found.rank


def test_a_loop_of_tenths_of_a_second_is_called_hanging_within_ten_seconds() -> None:
    assert hang(learned(), stepping(7.9), stepping(0.1)) is None
    assert hang(learned(), stepping(0.1), stepping(8.1)) == 1


def test_before_anything_was_learned_limits_are_generous() -> None:
    assert hang(Limits(LimitsConfig(), {}), stepping(START_STEP_S - 1), stepping(1)) is None
    assert hang(Limits(LimitsConfig(), {}), stepping(START_STEP_S + 1), stepping(1)) == 0


def test_the_first_steps_of_an_attempt_are_judged_by_none_that_came_after_them() -> None:
    """They compile and allocate, whatever earlier attempts have shown."""
    early = look(("step", None, 100.0, 100.0), times=2)
    assert hang(learned(), early, early) is None


# Case 1: an outer section over its limit while an inner one, opened later, is fresh.
def test_an_outer_section_over_its_limit_is_a_hang_however_fresh_an_inner_one_is() -> None:
    outer = ("outer", 10.0, 1.0, 11.0)
    inner = ("inner", 60.0, 0.1, 0.1)
    assert hang(learned(), look(("step", None, 0.1, 100.0), outer)) == 0
    assert hang(learned(), look(("step", None, 0.1, 100.0), outer, inner)) == 0
    assert hang(learned(), look(("step", None, 0.1, 100.0), ("outer", 10.0, 1.0, 9.0), inner)) is None
    silent = ("outer", None, 700.0, 700.0)  # an automatic one, over before the inner one began
    assert hang(learned(), look(("step", None, 0.1, 900.0), silent, inner)) == 0


def test_a_section_without_a_limit_is_never_over_it() -> None:
    assert hang(learned(), look(("step", None, 0.1, 1e9), ("export", math.inf, 1e6, 1e6))) is None


def test_a_section_that_its_user_limits_is_judged_by_its_whole_time() -> None:
    assert hang(learned(), look(("step", None, 0.1, 100.0), ("eval", 5.0, 0.2, 5.2))) == 0


def test_a_long_checkpoint_evaluation_or_compilation_is_no_hang() -> None:
    limits = learned(checkpoint=(40, 0.3), evaluation=(5, 1.0), compile=(1, 2.0))
    for name, seconds in (("checkpoint", 60.0), ("evaluation", 90.0), ("compile", 500.0)):
        assert hang(limits, look(("step", None, 0.1, 100.0), (name, None, seconds, seconds))) is None, name
    assert hang(limits, look(("step", None, 0.1, 1e3), ("checkpoint", None, 121.0, 121.0))) == 0


def test_who_waits_for_a_rank_that_is_busy_within_its_limit_does_not_hang() -> None:
    evaluates = look(("step", None, 0.1, 100.0), ("evaluation", None, 90.0, 90.0))
    assert hang(learned(), evaluates, stepping(89.0)) is None
    stuck = look(("step", None, 0.1, 700.0), ("evaluation", None, 601.0, 601.0))
    assert hang(learned(), stuck, stepping(600.0)) in (0, 1)
    late = look(("resume", None, 200.0, 200.0), step=-1)
    assert hang(learned(), late, stepping(150.0)) is None


def test_who_has_taken_the_step_already_excuses_nobody_who_is_still_in_it() -> None:
    """Rank 1 hangs in the step before a checkpoint: rank 0 waits for it there, and may for two minutes."""
    saving = ("checkpoint", None, 8.1, 8.1)
    ahead = look(("step", None, 0.1, 100.0), saving, step=51)
    assert hang(learned(checkpoint=(20, 0.05)), ahead, stepping(8.1, step=50)) == 1
    level = look(("step", None, 0.1, 100.0), saving, step=50)
    assert hang(learned(checkpoint=(20, 0.05)), level, stepping(8.1, step=50)) is None


def test_who_waited_is_silent_only_since_nobody_is_busy_any_more() -> None:
    """The evaluation is over, and the others have not had the time to take a step yet."""
    judge, limits = Judge(), learned()

    def judged(now: float, *ranks: Look) -> int | None:
        found = judge.find(dict(enumerate(ranks)), limits, init_s=600.0, now=now)
        return None if found is None else found.rank

    evaluates = look(("step", None, 0.1, 100.0), ("evaluation", None, 89.9, 89.9))
    assert judged(1089.9, evaluates, stepping(89.9)) is None
    assert judged(1090.4, stepping(0.3), stepping(90.4)) is None
    assert judged(1097.0, stepping(6.9), stepping(97.0)) is None
    assert judged(1098.5, stepping(7.9), stepping(98.5)) == 1


def test_what_was_waited_for_somebody_who_was_busy_is_no_silence_of_ones_own() -> None:
    judge, limits = Judge(), learned()
    for tenths in range(0, 900, 5):
        evaluates = look(("step", None, 0.1, 100.0), ("evaluation", None, tenths / 10, tenths / 10))
        judge.find({0: evaluates, 1: stepping(tenths / 10)}, limits, init_s=600.0, now=1000 + tenths / 10)
    assert judge.waited(90.2, 1093.0) == pytest.approx(89.5)
    assert judge.waited(0.3, 1093.0) == pytest.approx(0.3)
    assert judge.waited(50.0, 1300.0) == 0.0
    assert len(judge._stretches[0]) == 1


def test_the_rank_that_is_furthest_behind_is_named() -> None:
    assert hang(learned(), stepping(9.0, step=51), stepping(9.5, step=50), stepping(9.0, step=51)) == 1
    assert hang(learned(), stepping(9.0), stepping(9.5), stepping(9.2)) == 1


def test_a_rank_that_is_done_does_not_hang() -> None:
    assert hang(learned(), look(("step", None, 99.0, 99.0), done=True), stepping(0.1)) is None


def test_a_rank_without_a_word_is_judged_only_when_another_has_spoken() -> None:
    mute = Look(-1, 0, False, (Section("init", None, 700.0, 700.0, 0),), 0.0)
    assert hang(learned(), mute, mute) is None
    assert hang(learned(), mute, stepping(0.1)) == 0
    assert hang(learned(), mute, stepping(0.1), init_s=800.0) is None


def test_a_long_start_that_works_is_no_hang_and_one_that_does_nothing_is() -> None:
    working = look(("init", None, 900.0, 900.0), step=-1, quiet_s=2.0)
    idle = look(("init", None, 900.0, 900.0), step=-1, quiet_s=400.0)
    assert hang(learned(), working) is None
    assert hang(learned(), idle) == 0
    assert hang(learned(), look(("init", None, 2500.0, 2500.0), step=-1)) == 0


# Case 2: limits are on without a word of the user's, learned, and said.
def test_limits_are_on_by_default_and_said_whenever_they_change() -> None:
    limits = Limits(LimitsConfig(), {})
    assert limits.news() == {"(start)": 600.0, "step": 300.0}
    assert limits.news() is None
    limits.note({"step": (9, 0.1)})
    assert limits.news() is None  # too little to learn from
    limits.note({"step": (20, 0.1), "evaluation": (3, 60.0)})
    assert limits.news() == {"(start)": 600.0, "evaluation": 300.0, "step": 8.0}
    limits.note({"step": (30, 1.7)})
    assert limits.news() == {"(start)": 600.0, "evaluation": 300.0, "step": 8.5} or limits.of("step", 50) == pytest.approx(8.5)
    limits.note({"step": (40, 20.0)})
    assert limits.of("step", 50) == 100.0
    assert (limits.news() or {})["step"] == 100.0


def test_what_the_user_says_is_the_limit() -> None:
    limits = Limits(LimitsConfig(step_s=20.0), {})
    limits.note({"step": (500, 0.1)})
    assert limits.of("step", 1) == limits.of("step", 500) == 20.0
    fixed = Limits(LimitsConfig(learn=False), {"step": 0.1})
    assert fixed.of("step", 500) == START_STEP_S


def test_what_earlier_attempts_showed_holds_from_the_start_and_is_smoothed() -> None:
    limits = Limits(LimitsConfig(), {"step": 4.0, "evaluation": 90.0})
    assert limits.of("step", 50) == 20.0
    assert limits.of("evaluation", 0) == 450.0
    limits.note({"step": (100, 2.0)})
    assert limits.longest()["step"] == pytest.approx(3.0)
    limits.note({"step": (200, 6.0)})
    assert limits.longest()["step"] == pytest.approx(6.0)
