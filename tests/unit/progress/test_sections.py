"""Open sections, their two clocks, and what a rank learns of its own silences."""

from __future__ import annotations

import math
import mmap

import pytest

from slurm_resilience.progress import sections
from slurm_resilience.progress.page import PAGE_BYTES, PageReader, PageWriter
from slurm_resilience.progress.sections import LEARNED, NO_LIMIT, WARM_UP, Phase, Sections, read_frames, read_rows, short

S = 1_000_000_000


@pytest.fixture
def page() -> mmap.mmap:
    return mmap.mmap(-1, PAGE_BYTES)


def test_the_base_is_the_phase_and_its_silence_starts_again_at_every_beat(page: mmap.mmap) -> None:
    made = Sections(page, Phase.STEP, 10 * S)
    (frame,) = read_frames(page, 14 * S)
    assert (frame.name, frame.own_s, frame.total_s, frame.times) == ("step", 4.0, 4.0, 0)
    assert math.isnan(frame.limit_s)
    made.beat(15 * S)
    (frame,) = read_frames(page, 16 * S)
    assert (frame.own_s, frame.total_s, frame.times) == (1.0, 6.0, 1)


def test_own_time_stands_still_in_an_inner_section_and_total_time_does_not(page: mmap.mmap) -> None:
    made = Sections(page, Phase.STEP, 0)
    made.push("outer", Phase.USER, 30.0, 1 * S)
    made.push("inner", Phase.EVALUATION, NO_LIMIT, 3 * S)
    base, outer, inner = read_frames(page, 10 * S)
    assert (base.own_s, base.total_s) == (1.0, 10.0)
    assert (outer.name, outer.limit_s, outer.own_s, outer.total_s) == ("outer", 30.0, 2.0, 9.0)
    assert (inner.limit_s, inner.own_s, inner.total_s) == (NO_LIMIT, 7.0, 7.0)
    made.pop(13 * S)
    _, outer = read_frames(page, 14 * S)
    assert (outer.own_s, outer.total_s) == (3.0, 13.0)
    made.beat(15 * S)  # the silence of all of them ends
    base, outer = read_frames(page, 16 * S)
    assert (base.own_s, outer.own_s, outer.total_s) == (0.0, 1.0, 15.0)
    made.pop(17 * S)
    (base,) = read_frames(page, 18 * S)
    assert (base.own_s, base.total_s) == (1.0, 18.0)


def test_the_longest_silence_of_each_kind_of_work_is_kept(page: mmap.mmap) -> None:
    made = Sections(page, Phase.STEP, 0)
    for step in range(1, WARM_UP + 1):
        made.beat(step * 100 * S)  # compiles, allocates: teaches nothing
    start = WARM_UP * 100 * S
    made.beat(start + 2 * S)
    made.push("eval", Phase.EVALUATION, LEARNED, start + 3 * S)
    made.pop(start + 93 * S)
    made.beat(start + 94 * S)  # a step of two seconds of its own: one before, one after the evaluation
    assert read_rows(page) == {"step": (WARM_UP + 2, 2.0), "eval": (1, 90.0)}


def test_a_silence_is_shown_for_two_windows_and_then_no_more(page: mmap.mmap) -> None:
    """So that one that others were the reason for can be told apart when it is told, and hides nothing later."""
    made = Sections(page, Phase.STEP, 0)
    now = 0
    for step in range(1, 11):
        now = step * S // 10
        made.beat(now)
    made.beat(now + 90 * S)
    now += 90 * S
    assert read_rows(page)["step"].longest_s == 90.0
    longest = []
    for _ in range(250):
        now += S // 10
        made.beat(now)
        longest.append(read_rows(page)["step"].longest_s)
    assert longest[95] == 90.0
    assert longest[-1] == 0.1


def test_a_phase_that_goes_over_is_learned_and_going_back_starts_anew(page: mmap.mmap) -> None:
    made = Sections(page, Phase.INIT, 1 * S)
    made.switch(Phase.RESUME, 5 * S)
    made.switch(Phase.STEP, 9 * S)
    made.switch(Phase.STEP, 10 * S)
    (frame,) = read_frames(page, 11 * S)
    assert (frame.name, frame.own_s) == ("step", 2.0)
    assert read_rows(page) == {"init": (1, 4.0), "resume": (1, 4.0), "step": (0, 0.0)}


def test_a_switch_under_an_open_section_leaves_it_on_top(page: mmap.mmap) -> None:
    made = Sections(page, Phase.USER, 0)
    made.push("epoch", Phase.USER, LEARNED, 1 * S)
    made.switch(Phase.STEP, 2 * S)
    made.beat(4 * S)
    base, epoch = read_frames(page, 5 * S)
    assert (base.name, base.own_s, epoch.name, epoch.own_s, epoch.total_s) == ("step", 0.0, "epoch", 1.0, 4.0)
    made.pop(6 * S)
    assert [frame.name for frame in read_frames(page, 7 * S)] == ["step"]


def test_more_sections_than_a_page_holds_belong_to_the_innermost_that_has_a_place(page: mmap.mmap) -> None:
    made = Sections(page, Phase.STEP, 0)
    for depth in range(20):
        made.push(f"s{depth}", Phase.USER, LEARNED, depth * S)
    frames = read_frames(page, 30 * S)
    assert len(frames) == sections.MOST_FRAMES
    assert frames[-1].own_s == 24.0
    for _ in range(20):
        made.pop(31 * S)
    assert [frame.name for frame in read_frames(page, 31 * S)] == ["step"]
    made.pop(32 * S)  # one too many is no harm
    assert [frame.name for frame in read_frames(page, 32 * S)] == ["step"]


def test_names_without_a_row_are_judged_as_not_seen(page: mmap.mmap) -> None:
    made = Sections(page, Phase.STEP, 0)
    for number in range(sections.MOST_ROWS + 5):
        made.push(f"work {number}", Phase.USER, LEARNED, number * S)
        made.pop(number * S + S)
    assert len(read_rows(page)) == sections.MOST_ROWS
    made.push(f"work {sections.MOST_ROWS + 4}", Phase.USER, LEARNED, 50 * S)
    assert read_frames(page, 51 * S)[-1].times == 0


def test_long_names_fit_and_stay_apart() -> None:
    one, other = short("a very long name of a section, one"), short("a very long name of a section, two")
    assert one != other
    assert max(len(one.encode()), len(other.encode()), len(short("ä" * 30).encode())) < 24
    assert short("eval") == "eval"


def test_a_page_of_the_release_before_is_written_to_all_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    reader = PageReader(tmp_path / "page")
    reader._page[4:8] = (1).to_bytes(4, "little")
    writer = PageWriter(tmp_path / "page")
    writer.enter(Phase.STEP)
    writer.beat(3)
    assert (reader.read().step, reader.read().phase) == (3, Phase.STEP)


def test_own_time_of_steps_is_a_running_mean(tmp_path) -> None:  # type: ignore[no-untyped-def]
    reader = PageReader(tmp_path / "page")
    writer = PageWriter(tmp_path / "page")
    for _ in range(10):
        writer.own(0.5)
    for _ in range(200):
        writer.own(0.1)
    seen = reader.read()
    assert seen.own_count == 210
    assert seen.own_s == pytest.approx(0.1, rel=0.01)


def test_sections_pass_through_the_page(tmp_path) -> None:  # type: ignore[no-untyped-def]
    reader = PageReader(tmp_path / "page")
    writer = PageWriter(tmp_path / "page")
    writer.enter(Phase.STEP)
    writer.push("eval", Phase.EVALUATION, 30.0)
    seen = reader.read()
    assert seen.phase is Phase.EVALUATION
    assert [(frame.name, frame.phase) for frame in seen.frames] == [("step", Phase.STEP), ("eval", Phase.EVALUATION)]
    assert writer.enter(Phase.STEP) is Phase.STEP  # the program as a whole is still in its steps
    writer.pop()
    assert reader.read().phase is Phase.STEP
    assert reader.seen()["eval"].times == 1
