"""`logs`: what ranks printed, found by attempt and rank, read from the end and followed over a relaunch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe import logs


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two attempts of three ranks; the second failed at rank 2."""
    folder = tmp_path / "run"
    for attempt in (1, 2):
        of = folder / "logs" / f"attempt-{attempt:04d}"
        of.mkdir(parents=True)
        for rank in range(3):
            (of / f"rank-{rank:05d}.log").write_text("".join(f"a{attempt} r{rank} line {n}\n" for n in range(50)))
    (folder / "logs" / "agent-n1.log").write_text("agent here\n")
    (folder / "logs" / "supervisor.log").write_text("the supervisor\n")
    (folder / "incidents").mkdir()
    ends = [{"rank": 2, "code": -9, "node": "n1"}, {"rank": 0, "code": 1, "node": "n1"}]
    (folder / "incidents" / "0002.json").write_text(json.dumps({"v": 1, "ends": ends}))
    (folder / "events.jsonl").write_text("")
    (folder / "state.json").write_text('{"v": 1, "state": "running"}')
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["logs", *words]) == ExitCode.OK
    return capsys.readouterr().out.splitlines()


def test_the_last_lines_of_rank_0_and_of_the_rank_that_failed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, str(run_dir), "--lines", "2")
    assert out == [f"a2 rank {rank} | a2 r{rank} line {n}" for rank in (0, 2) for n in (48, 49)]


def test_the_rank_and_the_attempt_that_are_asked_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, str(run_dir), "--rank", "1", "--attempt", "1", "--lines", "1") == ["a1 r1 line 49"]
    assert said(capsys, str(run_dir), "--rank", "1", "--attempt", "-2", "--lines", "1") == ["a1 r1 line 49"]
    assert len(said(capsys, str(run_dir), "--rank", "1", "--lines", "0")) == 50
    assert len(said(capsys, str(run_dir), "--rank", "all", "--lines", "1")) == 3
    assert said(capsys, str(run_dir), "--node", "n1") == ["agent here"]
    assert said(capsys, str(run_dir), "--supervisor") == ["the supervisor"]


def test_without_a_name_it_is_the_newest_run_below(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RESILIENCE_RUN_DIR", raising=False)
    monkeypatch.chdir(run_dir.parent)
    assert len(said(capsys, "--rank", "0", "--lines", "3")) == 3
    document = json.loads("".join(said(capsys, "--json", "--lines", "1")))
    assert [each["lines"] for each in document["logs"]] == [["a2 r0 line 49"], ["a2 r2 line 49"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "7"], "attempt 2 has ranks 0 to 2"),
        (["--rank", "x"], "--rank x is no rank"),
        (["--attempt", "9"], "it has attempts 1 to 2"),
        (["--node", "n9"], "There is no log of n9"),
        (["--lines", "-1"], "makes no sense"),
        (["--rank", "1", "--node", "n1"], "exclude each other"),
    ],
)
def test_what_is_not_there_is_said(run_dir: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run_dir), *words]) == ExitCode.CONFIG_ERROR
    assert message in capsys.readouterr().err


def test_the_end_of_a_large_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 300_000 + b"\n" + b"".join(b"line %d\n" % n for n in range(30_000)) + b"\xff no end")
    lines, end = logs.tail(path, 3)
    assert lines == ["line 29998", "line 29999", "\ufffd no end"]
    assert end == path.stat().st_size
    path.write_bytes(b"")
    assert logs.tail(path, 3) == ([], 0)


def test_following_goes_on_over_a_relaunch_until_the_run_is_over(run_dir: Path) -> None:
    words = [sys.executable, "-m", "slurm_resilience", "logs", str(run_dir), "--rank", "0", "--follow", "--lines", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "a2 rank 0 | a2 r0 line 49\n"
        with open(run_dir / "logs" / "attempt-0002" / "rank-00000.log", "a") as file:
            file.write("more\n")
        assert following.stdout.readline() == "a2 rank 0 | more\n"
        third = run_dir / "logs" / "attempt-0003"
        third.mkdir()
        (third / "rank-00000.log").write_text("again\nand the last, without an end")
        assert following.stdout.readline() == "a3 rank 0 | again\n"
        (run_dir / "state.json").write_text('{"v": 1, "state": "complete"}')
        assert following.stdout.read() == "a3 rank 0 | and the last, without an end\n"
        assert following.wait(60) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_logs_of_somebody_else_are_not_said_to_be_missing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "logs").chmod(0o700)
    keep = os.geteuid()
    opened = [path for path in [run_dir, *run_dir.parents] if path.stat().st_mode & 0o011 != 0o011]
    for path in opened:
        path.chmod(path.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        assert main(["logs", str(run_dir)]) == ExitCode.CONFIG_ERROR
    finally:
        os.seteuid(keep)
        for path in opened:
            path.chmod(path.stat().st_mode & ~0o011)
    assert "You may not read the logs" in capsys.readouterr().err
