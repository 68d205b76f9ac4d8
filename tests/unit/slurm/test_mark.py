"""What we write into a job's comment, and how it is read again."""

from __future__ import annotations

import pytest

from slurm_resilience.slurm.mark import Marks, with_word


def test_a_comment_without_marks_is_the_users_alone() -> None:
    for words in ("", "mine", "a = [b] requeue at 3", "[slurm-resilience requeue]"):
        marks = Marks.read(words)
        assert (marks.words, str(marks)) == (words, words)
        assert not marks.ours


def test_all_marks_survive_a_round_trip_behind_the_users_words() -> None:
    marks = Marks("mine", excluded=("n1", "n2"), excluded_at=5.0, freed=2).held_by("a run]", 1000.4)
    text = str(marks)
    assert text == (
        "mine [slurm-resilience requeue a-run- at 1000] [slurm-resilience excluded n[1-2] at 5] [slurm-resilience freed 2]"
    )
    assert Marks.read(text) == marks
    assert Marks.read(text + " more").words == "mine more"
    assert str(marks.let_go()).startswith("mine [slurm-resilience excluded")


def test_marking_twice_marks_once() -> None:
    once = str(Marks.read("mine").held_by("a run", 1000.0))
    assert str(Marks.read(once).held_by("a run", 1000.0)) == once


@pytest.mark.parametrize(("before", "after"), [("", "resilient"), ("a b", "a b resilient"), ("resilient x", "resilient x")])
def test_the_word_stands_once(before: str, after: str) -> None:
    assert with_word(before) == after
    assert Marks.read(after).ours
