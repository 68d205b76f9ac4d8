"""How far long work is: never on stdout, no control codes into a pipe, and no guess before there is something to guess from."""

from __future__ import annotations

import threading

import pytest

from slurm_resilience.cli import progress


def test_what_is_said() -> None:
    assert progress.sentence("step-1", 3_100_000_000, 12_000_000_000, 13.0, progress._bytes) == (
        "step-1: 3.1 GB of 12.0 GB after 13 s, about 37 s left"
    )
    assert progress.sentence("machines", 0, 6, 2.0, str) == "machines: 0 of 6 after 2.0 s"
    assert progress.sentence("machines", 6, 6, 9.0, str) == "machines: 6 of 6 after 9.0 s"


def test_into_a_pipe_it_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.Lines("read", 4, str, every_s=0.0)
    for _ in range(4):
        lines.add(1)
    lines.clear()
    out = capsys.readouterr()
    assert out.out == ""
    assert [line.split(" after")[0] for line in out.err.splitlines()] == [f"read: {number} of 4" for number in range(1, 5)]
    assert "\x1b" not in out.err
    seldom = progress.Lines("read", 4, str, every_s=3600.0)
    seldom.add(1)
    with progress.of_bytes("x", 10, quiet=True) as told:
        told(5)
    assert capsys.readouterr().err == ""


def test_a_count_that_cannot_be_had_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK_EVERY_S", 0.001)
    asked = threading.Event()

    def count() -> int:
        asked.set()
        raise OSError("torn")

    with progress.of_count("machines", 3, count):
        assert asked.wait(60)
