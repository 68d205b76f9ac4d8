"""A process is its id and its start time; nothing else is ever signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from slurm_resilience.sandbox import processes
from slurm_resilience.sandbox.processes import Process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "983"], env={**os.environ, "SANDBOX_TEST": "one=two"}) as running:
        yield running
        running.kill()


def wait(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_recycled_id_is_not_the_process(child: subprocess.Popen[bytes]) -> None:
    real = Process.of(child.pid)
    assert real.alive()
    other = Process(real.pid, real.start + 1)
    assert not other.alive()
    assert not other.send(signal.SIGKILL)
    assert real.alive(), "the signal for another process did not reach this one"


def test_a_zombie_is_dead(child: subprocess.Popen[bytes]) -> None:
    process = Process.of(child.pid)
    assert process.send(signal.SIGKILL)
    wait(lambda: processes.state(child.pid) == "Z")
    assert not process.alive()
    assert not process.send(signal.SIGKILL)
    child.wait()
    assert processes.state(child.pid) == ""
    with pytest.raises(OSError, match=str(child.pid)):
        Process.of(child.pid)


def test_what_a_process_is(child: subprocess.Popen[bytes]) -> None:
    wait(lambda: processes.name(child.pid) == "sleep")
    assert processes.command_line(child.pid) == ["sleep", "983"]
    assert processes.environment(child.pid)["SANDBOX_TEST"] == "one=two"
    assert processes.parent(child.pid) == os.getpid()
    assert child.pid in processes.in_namespace_of(os.getpid())
    assert processes.open_file(os.getpid(), 0) == os.readlink("/proc/self/fd/0")


def test_tagged_finds_the_children_that_were_started_with_the_mark(child: subprocess.Popen[bytes]) -> None:
    wait(lambda: processes.name(child.pid) == "sleep")
    assert processes.tagged("SANDBOX_TEST", "one=two") == [Process.of(child.pid)]
    assert processes.tagged("SANDBOX_TEST", "one") == []


def test_kill_and_wait_returns_when_they_are_dead(child: subprocess.Popen[bytes]) -> None:
    process = Process.of(child.pid)
    processes.kill_and_wait([process, Process(process.pid, process.start - 1)])
    assert not process.alive()


def test_a_session_is_killed_whole() -> None:
    seconds = str(1_000_000 + os.getpid())  # another session's sleepers are not ours
    script = (
        "import os\n"
        "if os.fork():\n    os.wait()\n"
        f"else:\n    os.setsid()\n    os.execvp('bash', ['bash', '-c', 'sleep {seconds} & sleep {seconds}'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as outer:

        def sleepers() -> list[int]:
            return [pid for pid in processes.all_pids() if processes.command_line(pid) == ["sleep", seconds]]

        try:
            wait(lambda: len(sleepers()) == 2)
            processes.kill_session_of_child(outer.pid)
            wait(lambda: not sleepers())
        finally:
            outer.kill()
            processes.kill_and_wait([Process.of(pid) for pid in sleepers()])


def test_mapped_files_are_named() -> None:
    assert any("libc" in path for path in processes.mapped_files(os.getpid()))
