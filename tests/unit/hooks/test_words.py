"""Reasons, notes and Slurm's node lines: written by us, read back as they were, and hostile text stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.hooks import nodes, reason

LINE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1 CPUTot=8 Gres=gpu:4 RealMemory=4000 State={state} Partitions=low,high  "
    "BootTime=2026-11-30T01:06:21 AllocTRES= ExtSensorsTemp=n/s{rest}"
)


def one(state: str = "IDLE", rest: str = "") -> nodes.Node:
    return nodes.parse(LINE.format(state=state, rest=rest))[0]


def test_a_reason_says_whose_it_is_in_the_first_twenty_characters() -> None:
    text = reason.compose("gpu", "recovery", "g3", "123", 1796001234.5678, "1a2b3c4d5e6f", "node: GPU 3 asks for a reboot")
    assert text == "sr:gpu-recovery g3 j123 t=1796001234.568 b=1a2b3c4d node: GPU 3 asks for a reboot"
    told = reason.parse(text)
    assert told is not None
    assert (told.check, told.word, told.at, told.boot, told.job) == ("gpu", "recovery", 1796001234.568, "1a2b3c4d", "123")


@given(st.text(max_size=300))
def test_a_reason_is_one_short_line_that_no_shell_or_parser_trips_over(text: str) -> None:
    made = reason.compose("gpu", "", "", "1", 1796001234.0, "ab", text)
    assert len(made) <= reason.LONGEST
    assert made.isprintable()
    assert not set(made) & set("\"'\\`$[]{}|;&<>\n")
    assert reason.parse(made) is not None
    seen = one("IDLE+DRAIN", f" Reason={made} [root@2026-11-30T01:06:35]")
    assert seen.reason == made


@pytest.mark.parametrize(
    "foreign", ["ADMIN: sr:gpu said so", "NHC: x", "sr", "SR:gpu x", " sr:gpu x", "sr: x", "Epilog error", "", "sr:gpu!x"]
)
def test_a_foreign_reason_is_never_taken_for_ours(foreign: str) -> None:
    assert reason.parse(foreign) is None


def test_a_check_that_was_renamed_is_still_ours() -> None:
    told = reason.parse("sr:gpu-count g0 j1 t=1796001234.000 b=ab node: x")
    assert told is not None
    assert told.check == "gpu"
    for old, new in reason.RENAMED.items():
        text = reason.parse(f"sr:{old} x")
        assert text is not None
        assert text.check in (new, old.split("-")[0])


@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters="{}\n\r"), max_size=40))
def test_notes_live_beside_an_admins_comment(theirs: str) -> None:
    theirs = " ".join(theirs.split())
    comment = reason.with_note(theirs, "flag", "gpu", 5, "3 of 4 {x} $(reboot)")
    comment = reason.with_note(comment, "hold", "node", 6, "")
    comment = reason.with_note(comment, "flag", "gpu", 7, "2 of 4")
    assert [(note.kind, note.what, note.at) for note in reason.notes(comment)] == [("hold", "node", 6), ("flag", "gpu", 7)]
    assert reason.without_note(reason.without_note(comment, "hold"), "flag", "gpu") == theirs


def test_a_node_as_slurm_shows_it() -> None:
    seen = one("IDLE+DRAIN*", " Reason=ADMIN: do not touch [bob@2026-11-30T01:06:35] Comment=x {sr:hold node 5 bob} Extra=y")
    assert (seen.name, seen.drained, seen.reason, seen.user) == ("n1", True, "ADMIN: do not touch", "bob")
    assert seen.since == 1796000795.0
    assert seen.comment == "x {sr:hold node 5 bob}"
    assert seen.held
    assert seen.partitions == ["low", "high"]


@pytest.mark.parametrize(
    ("state", "flag"),
    [("IDLE+DRAIN", "DRAIN"), ("DOWN*+DRAIN", "DOWN"), ("IDLE+REBOOT_ISSUED", "REBOOT_ISSUED"), ("MIXED+PLANNED", "PLANNED"),
     ("IDLE+CLOUD+POWERING_UP", "POWERING_UP"), ("IDLE#", "IDLE"), ("ALLOCATED@", "ALLOCATED")],
)  # fmt: skip
def test_state_words(state: str, flag: str) -> None:
    assert flag in one(state).flags


def test_a_reason_with_brackets_words_and_a_newline_stays_one_reason() -> None:
    rest = " Reason=see [ticket 5] State=IDLE Comment=no\nsecond line [root@2026-11-30T01:06:35] Comment=real"
    seen = one("IDLE+DRAIN", rest)
    assert seen.state == "IDLE+DRAIN"
    assert seen.comment == "real"
    assert "second line" in seen.reason


@pytest.mark.parametrize("text", ["", "slurm_load_node error: x", "NodeName=n1 Arch=x", "{}"])
def test_an_answer_in_another_form_is_no_answer(text: str) -> None:
    with pytest.raises(ValueError, match=r"no node|no State"):
        nodes.parse(text)
