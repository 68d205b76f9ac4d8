"""What a node sees besides pages: its own absence, processes from outside, the kernel's words, flight recorders; slow ranks."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_resilience.config import LimitsConfig
from slurm_resilience.progress.page import Phase, Progress
from slurm_resilience.runtime import kernel, outside
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.blind import Blind
from slurm_resilience.runtime.flight_recorder import Recorder
from slurm_resilience.runtime.local_ranks import is_from_outside, tail
from slurm_resilience.runtime.outside import Outside
from slurm_resilience.runtime.processes import look
from slurm_resilience.runtime.stragglers import LOOK_EVERY_S, Stragglers, middle_without
from slurm_resilience.runtime.unseen import SAY_AFTER_S, Unseen, linger_s


def test_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    blind = Blind(100.0)
    for tenths in range(1, 20):
        blind.turn(100.0 + tenths / 10)
    assert blind.within(50.0, 102.0) == 0
    blind.turn(191.9)  # stopped for ninety seconds
    assert blind.within(95.0, 192.9) == pytest.approx(90.0)
    assert blind.within(10.0, 192.9) == pytest.approx(9.0)
    assert blind.within(0.5, 192.9) == 0


def looks(where: Outside, process: subprocess.Popen[bytes], at: float) -> float:
    found = look(process.pid)
    assert found is not None
    where.look([(0, found)], at)
    return where.quiet_s(0, at)


@pytest.mark.parametrize(
    ("code", "busy"),
    [
        ("import time; time.sleep(600)", False),
        ("while True: pass", True),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])", True),
        ("import time\nwhile True: print('x', flush=True); time.sleep(0.05)", True),
    ],
)
def test_a_process_is_busy_or_quiet(code: str, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing itself, by a child, or writing a log."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setattr(outside, "LOOK_EVERY_S", 0.5)
        where, began = Outside(), time.monotonic()
        assert looks(where, process, began) == 0
        while True:
            time.sleep(0.1)
            now = time.monotonic()
            quiet = looks(where, process, now)
            assert now - began < 90, quiet
            if now - began > 4 and (quiet < 1 if busy else quiet > 3):  # by then an interpreter has started
                return
    finally:
        subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
        process.kill()
        process.wait()


def kmsg(path: Path, *records: str) -> str:
    path.write_text("".join(f"{record}\n" for record in records))
    return str(path)


def test_kernel_lines_that_tell_are_found_and_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        "6,1,5000000,-;Memory cgroup out of memory: Killed process 77 (sr-rank-1) total-vm:1kB",
        "6,2,90000000,-;br0: port 4(n2) entered forwarding state",
        "4,3,91000000,-;Out of memory: Killed process 4711 (sr-rank-1) total-vm:9kB\n SUBSYSTEM=x",
        "3,4,92000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.",
        "garbage",
    ]
    read, write = os.pipe()
    queue = [record.encode() + b"\n" for record in records]

    def one_record(fd: int, size: int) -> bytes:
        if not queue:
            raise BlockingIOError
        return queue.pop(0)

    monkeypatch.setattr(kernel.os, "open", lambda *_: read)
    monkeypatch.setattr(kernel.os, "read", one_record)
    found = kernel.messages(60.0)
    os.close(write)
    assert len(found) == 2
    assert "Killed process 4711" in found[0]
    assert "Xid" in found[1]


def test_a_kernel_that_may_not_be_read_says_nothing(tmp_path: Path) -> None:
    assert kernel.messages(0.0, path=str(tmp_path / "nothing")) == []


@pytest.mark.parametrize(("outermost", "name", "pid", "found"), [
    (True, "x", 4711, True), (True, "sr-rank-1", 12, False), (False, "sr-rank-1", 12, True), (False, "sr-rank-2", 12, False),
])  # fmt: skip
def test_whom_the_memory_killer_took(
    outermost: bool, name: str, pid: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "[91.000] Memory cgroup out of memory: Killed process 4711 (sr-rank-1) total-vm:9kB"
    monkeypatch.setattr(kernel, "_is_outermost", lambda: outermost)
    assert bool(kernel.killed_for_memory(name, pid, ["[1.0] sr-rank-1 segfault", line])) is found


@pytest.mark.parametrize(("own", "file", "text"), [
    ("0::/job_7/step_0\n", "job_7/step_0/memory.events", "low 0\noom 3\noom_kill {}\n"),
    ("4:memory:/job_7\n0::/\n", "memory/job_7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
])  # fmt: skip
def test_kills_of_the_memory_controller_are_counted_in_both_versions(own: str, file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own)
    counter = tmp_path / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text.format(2))
    kills = kernel.MemoryKills(cgroups=tmp_path, own=str(tmp_path / "own"))
    assert kills.since() == 0
    counter.write_text(text.format(3))
    assert kills.since() == 1
    counter.unlink()
    assert kills.since() <= 0
    assert kernel.MemoryKills(cgroups=tmp_path, own=str(tmp_path / "none")).since() == 0


def test_flight_recorders_are_asked_and_their_dumps_taken_along(tmp_path: Path) -> None:
    pipe, prefix = tmp_path / "pipe-", tmp_path / "trace-"
    os.mkfifo(f"{pipe}1.pipe")
    listener = os.open(f"{pipe}1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    environment = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(pipe),
    }  # fmt: skip
    recorder = Recorder(tmp_path / "incidents" / "0001")
    recorder.ask(0, {})
    recorder.ask(1, environment)
    recorder.ask(2, environment)  # nobody listens there: it is not waited for
    assert os.read(listener, 10) == b"1\n"
    os.close(listener)
    Path(f"{prefix}1").write_bytes(b"pickle")
    found = recorder.collect()
    assert list(found) == ["1"]
    assert Path(found["1"]).read_bytes() == b"pickle"


def test_an_interpreter_that_says_why_it_died_has_the_last_word(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    frames = [f'  File "train.py", line {n} in f{n}' for n in range(3)]
    log.write_text(
        "\n".join([*map(str, range(50)), "Fatal Python error: Segmentation fault", "", *frames, "", "Extension modules: x"])
    )
    assert tail(log)[0] == "Fatal Python error: Segmentation fault"
    log.write_text("\n".join(map(str, range(50))))
    assert tail(log) == [str(n) for n in range(30, 50)]


# --- slow ranks ---------------------------------------------------------------------------------------------------------


def told(found: Stragglers, own: dict[int, tuple[float, int]], rounds: int, start: float = 1000.0) -> list[str]:
    names = []
    for number in range(rounds):
        counted = {rank: (seconds, count + 10 * number) for rank, (seconds, count) in own.items()}
        names += [f"{note[0]} {note[1]['rank']}" for note in found.look(counted, start + number * LOOK_EVERY_S)]
    return names


NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_the_middle_of_the_others_is_their_median() -> None:
    draw = random.Random(0)
    for count in range(2, 9):
        for _ in range(50):
            values = [draw.choice((0.1, 0.2, draw.random())) for _ in range(count)]
            for number, value in enumerate(values):
                others = values[:number] + values[number + 1 :]
                assert middle_without(sorted(values), value) == pytest.approx(statistics.median(others))


def test_a_rank_that_is_steadily_slower_is_told_once_and_its_recovery_too() -> None:
    found = Stragglers(NODES)
    slow = {0: (0.05, 20), 1: (0.05, 20), 2: (0.2, 20), 3: (0.052, 20)}
    assert told(found, slow, 2) == []
    assert told(found, slow, 5, start=2000.0) == ["straggler_found 2"]
    assert told(found, {**slow, 2: (0.05, 200)}, 2, start=3000.0) == ["straggler_recovered 2"]


def test_a_slow_node_is_called_one() -> None:
    found = Stragglers(NODES)
    notes = []
    for number in range(4):
        own = {0: (0.05, 20 + number), 1: (0.05, 20 + number), 2: (0.2, 20 + number), 3: (0.21, 20 + number)}
        notes += found.look(own, 1000 + number * LOOK_EVERY_S)
    assert {note[1]["rank"] for note in notes} == {2, 3}
    assert all(note[1]["whole_node"] for note in notes)
    assert notes[0][1]["times"] > 1.5


def test_jitter_noise_and_a_rank_alone_are_no_straggler() -> None:
    assert told(Stragglers(NODES), {0: (0.05, 20), 1: (0.07, 20), 2: (0.06, 20), 3: (0.05, 20)}, 6) == []
    assert told(Stragglers(NODES), {0: (0.0001, 20), 1: (0.0009, 20), 2: (0.0001, 20), 3: (0.0001, 20)}, 6) == []
    assert told(Stragglers({0: "n1"}), {0: (0.5, 20)}, 6) == []
    assert told(Stragglers(NODES), {0: (0.05, 2), 1: (0.9, 2)}, 1) == []


# --- ranks that say nothing -----------------------------------------------------------------------------------------------


def beat(quiet_s: float, *, beats: int = 0, step: int = -1, phase: int = 0) -> m.RankProgress:
    return m.RankProgress(step, phase, 1.0, False, 1.0, beats, (), 0.0, 0, quiet_s)


@pytest.mark.parametrize(
    ("beats", "phase", "step", "done", "watched"),
    [(0, Phase.INIT, -1, False, True), (3, Phase.STEP, 7, False, False), (9, Phase.USER, 9, True, True)],
)
def test_ranks_are_watched_from_outside_before_they_train_and_after(
    beats: int, phase: Phase, step: int, done: bool, watched: bool
) -> None:
    assert is_from_outside(Progress(step, beats, 1.0, phase, 1.0, done)) is watched


def test_who_is_complete_and_does_nothing_lingers() -> None:
    def done(quiet_s: float) -> m.RankProgress:
        return beat(quiet_s, beats=30, step=7, phase=2)._replace(done=True)

    limits = LimitsConfig(quiet_s=100)
    assert linger_s({0: done(120.0), 1: done(101.0)}, limits) == 101.0
    assert linger_s({0: done(120.0), 1: done(99.0)}, limits) is None
    assert linger_s({0: done(120.0), 1: beat(120.0, beats=30, step=7, phase=2)}, limits) is None
    assert linger_s({0: done(120.0)}, LimitsConfig(quiet_s=100, kill_quiet=False)) is None
    assert linger_s({}, limits) is None
    assert Unseen().look({0: done(120.0)}, NODES, limits, age_s=10.0) == ([], None)


def test_it_is_said_that_less_is_known_of_a_plain_script() -> None:
    unseen, limits = Unseen(), LimitsConfig()
    ranks = {0: beat(0.0), 1: beat(0.0)}
    assert unseen.look(ranks, NODES, limits, age_s=SAY_AFTER_S - 1) == ([], None)
    notes, hang = unseen.look(ranks, NODES, limits, age_s=SAY_AFTER_S + 1)
    assert [note[0] for note in notes] == ["watched_from_outside"]
    assert hang is None
    assert unseen.look(ranks, NODES, limits, age_s=SAY_AFTER_S + 2) == ([], None)
    assert Unseen().look({0: beat(0.0, beats=3), 1: beat(0.0)}, NODES, limits, age_s=99.0) == ([], None)


def test_a_long_quiet_is_told_and_is_a_hang_when_nobody_does_anything() -> None:
    limits = LimitsConfig(quiet_s=100)
    notes, hang = Unseen().look({0: beat(120.0), 1: beat(3.0)}, NODES, limits, age_s=10.0)
    assert [(note[0], note[1]["rank"]) for note in notes] == [("rank_quiet", 0)]
    assert hang is None
    _, hang = Unseen().look({0: beat(120.0), 1: beat(101.0)}, NODES, limits, age_s=10.0)
    assert hang is not None
    assert "for 120 s (limit 100 s)" in hang.why
    _, hang = Unseen().look({0: beat(120.0), 1: beat(101.0)}, NODES, LimitsConfig(quiet_s=100, kill_quiet=False), age_s=10.0)
    assert hang is None
    training = beat(120.0, beats=30, step=7, phase=2)
    assert Unseen().look({0: training, 1: training}, NODES, limits, age_s=10.0) == ([], None)
