"""Processes are found, named and killed exactly, also those that tried to get away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_resilience.runtime import processes
from slurm_resilience.runtime.processes import Process, carrying, descendants, exit_of, is_alive, look, myself, send_signal


def wait_for(condition: Callable[[], object], within_s: float = 50.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def running(code: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that has printed its first line."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_process_is_its_number_and_its_start() -> None:
    me = myself()
    assert me.pid == os.getpid()
    assert me.parent == os.getppid()
    assert is_alive(me)
    assert not is_alive(me._replace(started=me.started - 1))
    assert look(2**22 + 1) is None


def test_a_name_with_blanks_and_parentheses_is_no_trap() -> None:
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b') R 1 (x', 0, 0, 0); print(flush=True); time.sleep(600)"
    with running(code) as child:
        found = look(child.pid)
        assert found is not None
        assert (found.parent, found.state in "SR") == (os.getpid(), True)


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    wait_for(lambda: (found := look(pid)) is not None and found.state == "Z")
    found = look(pid)
    assert found is not None
    assert not is_alive(found)
    assert pid not in {process.pid for process in descendants(os.getpid())}
    os.waitpid(pid, 0)


def test_only_the_process_that_was_meant_is_signalled() -> None:
    with running("import time; print(flush=True); time.sleep(600)") as child:
        found = look(child.pid)
        assert found is not None
        assert not send_signal(found._replace(started=found.started + 1), signal.SIGKILL)
        assert child.poll() is None
        assert send_signal(found, signal.SIGKILL)
        assert child.wait() == -9
        assert not send_signal(found, signal.SIGKILL)
    assert not send_signal(Process(2**22 + 1, 1, "S", 1), signal.SIGKILL)


def test_descendants_are_all_of_them_and_the_spared_ones_are_left_out_alone() -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n"
        "    print(flush=True); time.sleep(600)\ntime.sleep(600)"
    )
    with running(code) as child:
        found = descendants(child.pid)
        assert len(found) == 2
        (middle,) = [process for process in found if process.parent == child.pid]
        assert {process.pid for process in descendants(child.pid, spare={middle.pid})} == {p.pid for p in found} - {middle.pid}
        for process in found:
            send_signal(process, signal.SIGKILL)


def test_processes_are_found_by_what_they_were_started_with() -> None:
    with running("import time; print(flush=True); time.sleep(600)", RUN_X="one", NODE_X="a") as child:
        assert [process.pid for process in carrying({"RUN_X": "one", "NODE_X": "a"})] == [child.pid]
        assert carrying({"RUN_X": "one", "NODE_X": "b"}) == []
        assert carrying({"RUN_X": "on"}) == []


def test_spawn_says_in_the_log_what_went_wrong(tmp_path: Path) -> None:
    log = tmp_path / "new" / "x.log"
    for argv, cwd, code in (
        (["true"], None, 0),
        (["no-such"], None, 127),
        (["/etc/passwd"], None, 126),
        (["true"], "/nowhere", 127),
    ):
        pid = processes.spawn(argv, env=dict(os.environ), log=log, cwd=cwd, header="# header")
        _, status = os.waitpid(pid, 0)
        assert exit_of(status) == (code, "")
    text = log.read_text()
    assert text.count("# header") == 4
    assert "cannot start no-such" in text
    assert "/nowhere" in text


def test_a_spawned_process_has_a_session_no_open_files_and_dies_with_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    code = (
        "import sys, os, time; from pathlib import Path\n"
        "from slurm_resilience.runtime.processes import spawn\n"
        "leak = os.open('/', os.O_RDONLY); os.set_inheritable(leak, True)\n"
        f"pid = spawn([sys.executable, '-c', 'import os, time; print(sorted(os.listdir(\"/proc/self/fd\")), "
        f"os.getsid(0) == os.getpid(), flush=True); time.sleep(600)'], env=dict(os.environ), log=Path({str(log)!r}))\n"
        "print(pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: log.exists() and log.read_text().strip())
    assert log.read_text().split("] ") == ["['0', '1', '2', '3'", "True\n"]  # 3 is the listing itself
    found = look(pid)
    assert found is not None
    assert is_alive(found)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(found))


@pytest.mark.parametrize(
    ("status", "code", "name"), [(0, 0, ""), (3 << 8, 3, ""), (9, -9, "SIGKILL"), (139, -11, "SIGSEGV"), (36, -36, "SIG36")]
)
def test_exits_read_as_in_python(status: int, code: int, name: str) -> None:
    assert exit_of(status) == (code, name)
