"""What really went wrong for people who looked at their jobs, each as a small input and what is right."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode, FormatError
from slurm_resilience.observe.events import FILE_NAME, read_events, read_for_standing
from slurm_resilience.observe.explain import explain
from slurm_resilience.observe.incidents import Incidents
from slurm_resilience.observe.standing import Standing
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.states import JobState, cancelled_by, parse_state
from slurm_resilience.submit.handles import SlurmHandle
from tests.unit.observe import a_run
from tests.unit.slurm.recordings import RECORDED

Answers = Callable[..., None]


@pytest.fixture
def answers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Puts a program in front of PATH that answers as a real Slurm did."""
    bin_dir = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", f"{bin_dir}{os.pathsep}{os.environ['PATH']}")

    def answer(command: str, *, recorded: str = "", err: str = "", code: int = 0) -> None:
        show = f"cat '{RECORDED / recorded}'" if recorded else ":"
        (bin_dir / command).write_text(f"#!/bin/sh\n{show}\nprintf '%s' '{err}' >&2\nexit {code}\n")
        (bin_dir / command).chmod(0o755)

    return answer


# --- 1: accounting is away ---------------------------------------------------------------------------------------------

AWAY = [
    "Slurm accounting storage is disabled",
    "sacct: error: slurm_persist_conn_open: failed to send init message\nsacct: error: Connection refused",
]


@pytest.mark.parametrize("said", AWAY)
def test_case_1_sacct_fails_and_the_controller_still_answers(answers: Answers, tmp_path: Path, said: str) -> None:
    answers("sacct", err=said, code=1)
    answers("scontrol", recorded="job-running.txt")
    record = CommandClient(timeout_s=20).job("32")
    handle = SlurmHandle(
        record.job_id, script=record.command, submitted_at=0.0, run=RunFolder(tmp_path), client=CommandClient(timeout_s=20)
    )
    seen = handle.look()
    assert (seen.state, seen.final) == (JobState.RUNNING, False)


@pytest.mark.parametrize("said", AWAY)
def test_case_1_at_worst_it_is_unknown_and_never_failed(answers: Answers, tmp_path: Path, said: str) -> None:
    answers("sacct", err=said, code=1)
    answers("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1)
    handle = SlurmHandle("32", script="x", submitted_at=0.0, run=RunFolder(tmp_path), client=CommandClient(timeout_s=20))
    seen = handle.look()
    assert (seen.state, seen.final) == (JobState.UNKNOWN, False)


def test_case_1_status_needs_no_accounting(answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sacct", "scontrol", "squeue"):
        answers(command, err=AWAY[1], code=1)
    assert main(["status", str(a_run.write(tmp_path / "run"))]) == ExitCode.OK
    assert "complete" in capsys.readouterr().out


# --- 2: states are kept apart --------------------------------------------------------------------------------------------

STATES = ["PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REQUEUED", "COMPLETING", "CANCELLED by 1001"]


def test_case_2_states_are_kept_apart() -> None:
    read = [parse_state(text) for text in STATES]
    assert [str(state) for state in read] == [text.split(" ")[0] for text in STATES]
    assert [cancelled_by(text) for text in STATES] == [None] * 7 + [1001]
    assert not JobState.COMPLETING.ended
    assert not JobState.REQUEUED.ended


# --- 3: the event file -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return a_run.write(tmp_path / "run")


def numbers(folder: Path) -> list[int]:
    return [event["seq"] for event in read_events(folder)]


def test_case_3_a_torn_last_line(run_dir: Path) -> None:
    before = numbers(run_dir)
    with open(run_dir / FILE_NAME, "ab") as file:
        file.write(b'{"v": 1, "seq": 99999, "t": 1800000400.0, "restart": 1, "attempt": 4, "event": "run_fai')
    assert numbers(run_dir) == before
    assert Standing.of(read_for_standing(run_dir)).doing == "complete"


def test_case_3_lines_out_of_order_are_put_into_the_order_of_their_numbers(run_dir: Path) -> None:
    """What two supervisors wrote in the second in which one took over from the other."""
    right = list(read_events(run_dir))
    lines = (run_dir / FILE_NAME).read_bytes().splitlines(keepends=True)
    rng = random.Random(3)
    moved = sorted(range(len(lines)), key=lambda position: position + rng.uniform(0, 200))
    assert moved != sorted(moved)
    (run_dir / FILE_NAME).write_bytes(b"".join(lines[position] for position in moved))
    assert list(read_events(run_dir)) == right
    assert [each.as_dict() for each in Incidents.of(read_events(run_dir))] == [each.as_dict() for each in Incidents.of(right)]


def test_case_3_clocks_of_other_nodes_change_no_order_and_no_sign(run_dir: Path) -> None:
    rng = random.Random(4)
    events = list(read_events(run_dir))
    for event in events:
        event["t"] += rng.choice((-90.0, 0.0, 45.0))
    (run_dir / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert numbers(run_dir) == [event["seq"] for event in events]
    incidents = Incidents.of(read_events(run_dir))
    assert [each.cause for each in incidents] == ["rank_crash", "node_lost", "preemption"]
    assert all(seconds >= 0 for each in incidents for seconds in each.phases.values())
    assert len(explain(run_dir)) == 3


def test_case_3_foreign_lines_are_passed_over_and_a_newer_format_is_refused(run_dir: Path) -> None:
    before = numbers(run_dir)
    with open(run_dir / FILE_NAME, "a") as file:
        file.write('[1]\n{"event": 3}\n{"event": "no_time"}\n\x00\x00\n')
    assert numbers(run_dir) == before
    with open(run_dir / FILE_NAME, "a") as file:
        file.write('{"v": 99, "seq": 100000, "t": 1.0, "restart": 0, "attempt": 9, "event": "x"}\n')
    with pytest.raises(FormatError, match="version is 99"):
        numbers(run_dir)


# The most memory that a reader takes beyond what it takes for a run of three lines.
READERS = {"status": 24, "events": 24, "explain": 24, "report": 40}


def peak_kib(run_dir: Path, reader: str, out: Path) -> int:
    words = {"events": ["events", str(run_dir), "--incidents"], "report": ["report", str(run_dir), "-o", str(out / "r.html")]}
    code = (
        "import resource, sys; from slurm_resilience.cli import main; code = main(sys.argv[1:]); "
        "sys.stderr.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *words.get(reader, [reader, str(run_dir)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=True)
    return int(done.stderr)


def lengthen(run_dir: Path, to_bytes: int) -> None:
    """Many step reports between the first step and what follows."""
    head, first, rest = (run_dir / FILE_NAME).read_bytes().partition(b'"event": "first_step"')
    end = rest.index(b"\n") + 1
    report = next(line for line in rest.splitlines(keepends=True) if b"step_reported" in line)
    event = json.loads(report)
    event["seq"] = head.count(b"\n") + 1
    line = (json.dumps(event) + "\n").encode()
    with open(run_dir / FILE_NAME, "wb") as file:
        file.write(head + first + rest[:end])
        file.writelines(line * 1000 for _ in range(to_bytes // (len(line) * 1000)))
        file.write(rest[end:])


@pytest.mark.parametrize("reader", READERS)
def test_case_3_memory_does_not_grow_with_the_file(run_dir: Path, tmp_path: Path, reader: str) -> None:
    small = peak_kib(run_dir, reader, tmp_path)
    lengthen(run_dir, 24 << 20)
    assert peak_kib(run_dir, reader, tmp_path) - small < READERS[reader] << 10


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_case_3_a_gigabyte_of_events(run_dir: Path, tmp_path: Path, reader: str) -> None:
    small = peak_kib(run_dir, reader, tmp_path)
    lengthen(run_dir, 1 << 30)
    assert peak_kib(run_dir, reader, tmp_path) - small < READERS[reader] << 10


# --- 4 and 5: what to expect of a plan ---------------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(["plan", *words, "--json"]) == ExitCode.OK
    document: dict[str, float] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    ("words", "ettr", "within"),
    [
        (["--nodes", "2000", "--interval-min", "60"], 0.70, 0.02),
        (["--nodes", "2000", "--interval-min", "5"], 0.93, 0.01),
        (["--nodes", "1000", "--interval-min", "30", "--queue-min", "1"], 0.90, 0.015),
    ],
)
def test_case_4_published_figures(words: list[str], ettr: float, within: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "ettr", "--rate", "6.5e-3", "--restart-min", "5", "--days", "2", *words)
    assert found["ettr"] == pytest.approx(ettr, abs=within)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.225)])
def test_case_4_mean_time_to_failure(gpus: int, hours: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "ettr", "--gpus", str(gpus), "--rate", "6.5e-3", "--interval-min", "5", "--days", "1")
    assert found["mttf_h"] == pytest.approx(hours, rel=0.01)


def test_case_5_nothing_ever_fails(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "ettr", "--nodes", "64", "--rate", "0", "--save-min", "6", "--interval-min", "60", "--days", "2")
    assert found["ettr"] == pytest.approx(1 / (1 + 6 / 60), abs=1e-9)
    advised = planned(capsys, "interval", "--nodes", "64", "--rate", "0", "--save-min", "6")
    assert advised["interval_min"] == 60.0
    assert advised["ettr"] == pytest.approx(1 / (1 + 6 / 60), abs=1e-9)
    assert planned(capsys, "ettr", "--nodes", "64", "--rate", "0", "--save-min", "6", "--days", "2")["interval_min"] == 60.0


# --- 6: a narrow terminal, no colour, a pipe ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["status"], ["events"], ["events", "--incidents"], ["explain"]])
def test_case_6_sixty_columns_and_no_control_codes(run_dir: Path, words: list[str]) -> None:
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm-256color", "FORCE_COLOR": ""}
    done = subprocess.run(
        [sys.executable, "-m", "slurm_resilience", words[0], str(run_dir), *words[1:]],
        capture_output=True, text=True, timeout=120, check=True, env=environment,
    )  # fmt: skip
    assert all(char.isprintable() or char == "\n" for char in done.stdout)
    if words[0] in ("status", "explain"):  # the others have a line for a fact, for grep
        assert max(map(len, done.stdout.splitlines())) <= 60
    assert "n3" in done.stdout
