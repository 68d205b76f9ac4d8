"""Failures of every kind, and what `explain` says of them: the right rank, node, cause and first exception.

After each of them nothing of the old attempt is alive, and the next attempt went on from the last committed step.  On pretend
nodes of this machine; what needs real nodes is in tests/slurm/test_explain.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import read_events
from tests.faults import cast
from tests.faults.mishaps import AT, EVERY, GUILTY
from tests.faults.nemesis import newest_step, wait_for
from tests.faults.trial import Watch, events_of

MISHAPS = Path(__file__).with_name("mishaps.py")
STEPS = 20
LONG_S = 240.0


class Local:
    """One supervised run of the program, two pretend nodes with a rank each, in a process of its own."""

    def __init__(
        self, run_dir: Path, kind: str, *, steps: int = STEPS, options: tuple[str, ...] = (), **environment: str
    ) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_name("supervisor.out")
        self.argv = [
            sys.executable, "-m", "slurm_resilience", "run", "--local", "2", "--run-dir", os.fspath(run_dir),
            "--checkpoint-every", str(EVERY), *options, "--", sys.executable, os.fspath(MISHAPS), kind, str(steps),
        ]  # fmt: skip
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/tmp", env=self.environment
            )

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        seen = cast.look(self.run_dir)
        for process in [*seen.supervisors, *seen.agents.values()]:
            process.send(signal.SIGCONT)
            process.send(signal.SIGKILL)
        self.child.kill()
        self.child.wait(60)

    def ended(self) -> bool:
        return self.child.poll() is not None

    def say(self) -> str:
        logs = "".join(
            f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.run_dir.glob("logs/*/*.log")
        )
        return "\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-25:]) + logs

    def finish(self) -> int:
        wait_for("the end of the run", self.ended, LONG_S, say=self.say)
        return int(self.child.wait())


def explain(run_dir: Path) -> tuple[list[dict[str, Any]], str]:
    """What the command says, for programs and for people."""
    command = [sys.executable, "-m", "slurm_resilience", "explain", os.fspath(run_dir)]
    document = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(text)
    return json.loads(document)["incidents"], " ".join(text.split())


def nothing_of(run_dir: Path, watch: Watch) -> None:
    """Nothing of an old attempt was alive beside a new one, and nothing at all is left."""
    wait_for("the end of all processes", lambda: not cast.look(run_dir).everybody(), 90)
    assert watch.looks > 3
    assert watch.overlaps == []


def resumed_right(run_dir: Path, expected: int) -> None:
    """The attempt after the incident went on from the last step that had been committed before it."""
    events = list(read_events(run_dir))
    second = [event["step"] for event in events if event["event"] == "resumed" and event["attempt"] == 2]
    before = [event["step"] for event in events if event["event"] == "checkpoint_committed" and event["attempt"] == 1]
    assert second == [max(before)] == [expected]
    assert newest_step(run_dir) == STEPS


@dataclass(frozen=True)
class Expected:
    """What has to be named.  ``words`` stand in the text for people, ``exception`` is the type of the first one."""

    cause: str
    words: tuple[str, ...]
    exception: str | None = None
    signal: str | None = None
    options: tuple[str, ...] = ()


EXPECTED = {
    "exception": Expected("rank_crash", ("the loss of rank 1 is a teapot", "mishaps.py"), "RuntimeError"),
    "os_exit": Expected("rank_crash", ("exited with 3",)),
    "segfault": Expected("rank_crash", ("SIGSEGV", "Segmentation fault", "segfault"), signal="SIGSEGV"),
    "memory_error": Expected("oom", ("MemoryError", "ran out of memory"), "MemoryError"),
    "endless_loop": Expected("hang", ("in endless_loop", "waits for the others in all_reduce")),
    "sleeps_for_ever": Expected("hang", ("in sleeps_for_ever", "stands still", "waits for the others in all_reduce")),
    "other_collective": Expected("hang", ("barrier", "all_reduce", "they will never meet")),
    "loader_death": Expected("rank_crash", ("DataLoader worker", "exited unexpectedly"), "RuntimeError"),
}
# Cheap enough for every run of the tests; a hang costs its limit.
SHORT = ("exception",)


def check(kind: str, run_dir: Path, watch: Watch) -> None:
    expected = EXPECTED[kind]
    (found,), text = explain(run_dir)
    assert found["cause"] == expected.cause, found["detail"]
    assert (found["rank"], found["node"]) == (GUILTY, "n2"), found["detail"]
    assert found["attempt"] == 1
    assert (found["first_exception"] or {}).get("type") == expected.exception
    if found["first_exception"]:
        assert found["first_exception"]["rank"] == GUILTY
        assert "mishaps.py" in found["first_exception"]["traceback"]
    for words in expected.words:
        assert words in text, words
    if expected.signal:
        ends = {end["rank"]: end["signal"] for end in found["evidence"]["ends"]}
        assert ends[GUILTY] == expected.signal
    assert found["recovered"]
    assert [each["action"] for each in found["decisions"]] == ["launch"]
    resumed_right(run_dir, AT - AT % EVERY)
    nothing_of(run_dir, watch)


@pytest.mark.parametrize("kind", [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in EXPECTED])
@pytest.mark.timeout(900)
def test_each_failure_is_named(kind: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # the learned limit needs ten steps of experience, which these few steps give; the floor makes the test quick
    with Local(run_dir, kind, options=("--set", "limits.floor_s=4")) as run, Watch(run_dir) as watch:
        assert run.finish() == 0, run.say()
        check(kind, run_dir, watch)
    if EXPECTED[kind].cause == "hang":
        fault = events_of(run_dir, "fault_detected")[0]
        limits = [event for event in events_of(run_dir, "limits_set") if float(event["t"]) <= float(fault["t"])]  # type: ignore[arg-type]
        assert limits[-1]["limits"]["step"] < 300, "the limit that held had been learned"  # type: ignore[index]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Saves fail and training goes on; only the last save ends the run, and it comes back when there is room again."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", os.fspath(small)], check=False).returncode:
        pytest.skip("not run: a file system of its own needs root")
    try:
        run_dir = tmp_path / "run"
        options = ("--set", f"checkpoint.dir={json.dumps(os.fspath(small))}")
        with Local(run_dir, "none", options=options) as run, Watch(run_dir) as watch:
            wait_for("a checkpoint", lambda: bool(events_of(run_dir, "checkpoint_committed")), LONG_S, say=run.say)
            filler = small / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
            wait_for("the end of the attempt", lambda: bool(events_of(run_dir, "fault_detected")), LONG_S, say=run.say)
            filler.unlink()
            assert run.finish() == 0, run.say()
            nothing_of(run_dir, watch)
        found, text = explain(run_dir)
        assert found[0]["cause"] == "rank_crash"
        assert "no room" in text or "No space left" in text
        assert events_of(run_dir, "checkpoint_failed")
        committed = [event for event in events_of(run_dir, "checkpoint_committed") if event["attempt"] == 1]
        assert found[0]["resumed_step"] == committed[-1]["step"]
        assert newest_step(run_dir) == STEPS
    finally:
        subprocess.run(["umount", "-l", os.fspath(small)], check=False)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_supervisor_is_named(tmp_path: Path) -> None:
    """Started again in time it finds all ranks alive; else they have been stopped, and go on from the last checkpoint."""
    run_dir = tmp_path / "run"
    with Local(run_dir, "none", steps=STEPS * 10) as run, Watch(run_dir) as watch:
        wait_for("training", lambda: newest_step(run_dir) > AT, LONG_S, say=run.say)
        (supervisor,) = cast.look(run_dir).supervisors
        supervisor.send(signal.SIGKILL)
        run.child.wait(60)
        run.start()
        assert run.finish() == 0, run.say()
        nothing_of(run_dir, watch)
    (found, *_), text = explain(run_dir)
    assert found["cause"] == "supervisor_lost"
    assert "the supervisor died and was started again" in text
    if events_of(run_dir, "attempt_adopted"):
        assert "let it go on; nothing was lost" in text
    else:
        committed = [event for event in events_of(run_dir, "checkpoint_committed") if event["attempt"] == 1]
        assert found["resumed_step"] == committed[-1]["step"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_stopped_rank_is_seen_as_what_it_is(tmp_path: Path) -> None:
    """State T answers no signal: it is named by what the kernel shows, and does not hold the kill back."""
    run_dir = tmp_path / "run"
    with Local(run_dir, "none", steps=60, options=("--set", "limits.floor_s=4")) as run, Watch(run_dir) as watch:
        wait_for("training", lambda: newest_step(run_dir) > 20, LONG_S, say=run.say)
        (victim,) = [rank for rank in cast.look(run_dir).ranks if rank.rank == GUILTY]
        victim.process.send(signal.SIGSTOP)
        assert run.finish() == 0, run.say()
        nothing_of(run_dir, watch)
    (found,), text = explain(run_dir)
    assert (found["cause"], found["rank"]) == ("hang", GUILTY)
    assert "is stopped by a signal (state T)" in text
    assert found["phases"]["stopped"] - found["phases"]["detected"] < 10
