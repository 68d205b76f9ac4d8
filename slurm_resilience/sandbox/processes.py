"""Which processes are there, and are they still the ones we started?  Reads /proc and sends signals.

Standard library only (the entering program imports it).  A process id alone proves nothing: the kernel uses it
again.  With its start time it means one process for ever, so only the pair is stored and killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_resilience.errors import SandboxError


def start_time(pid: int) -> int:
    """Clock ticks from boot to the start of ``pid``.  Raises OSError when there is no such process."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second may hold spaces and brackets."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


@dataclass(frozen=True)
class Process:
    """One process for ever: its id and its start time."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Raises OSError when there is no such process."""
        return cls(pid, start_time(pid))

    def alive(self) -> bool:
        """It exists, is the same, and is more than a zombie that waits to be reaped."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return False
        return int(fields[19]) == self.start and fields[0] not in ("Z", "X")

    def send(self, number: int) -> bool:
        """Send a signal to this very process; False when it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def all_pids() -> list[int]:
    """Every process id of the machine, ascending."""
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def environment(pid: int) -> dict[str, str]:
    """What the process was started with (a fork keeps its parent's); empty when it is gone or hidden."""
    raw = _read(pid, "environ")
    pairs = (item.partition("=") for item in raw.split("\0") if item)
    return {name: value for name, _, value in pairs}


def command_line(pid: int) -> list[str]:
    """Its arguments; empty for a kernel thread, a zombie, or a process that is gone."""
    raw = _read(pid, "cmdline")
    return raw.rstrip("\0").split("\0") if raw else []


def name(pid: int) -> str:
    """/proc/PID/comm: at most 15 bytes of the program's name; empty when it is gone."""
    return _read(pid, "comm").rstrip("\n")


def state(pid: int) -> str:
    """One letter: R, S, D, T (stopped), Z …; empty when it is gone."""
    try:
        return _stat(pid)[0]
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Its parent's id; 0 when it is gone or the parent is outside our sight."""
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def mapped_files(pid: int) -> set[str]:
    """The files that the process has mapped into its memory, as it names them."""
    return {line.split(maxsplit=5)[5] for line in _read(pid, "maps").splitlines() if len(line.split(maxsplit=5)) == 6}


def open_file(pid: int, fd: int) -> str:
    """What an open file descriptor of the process leads to; empty when that cannot be known."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""


def inner_pid(pid: int) -> int:
    """The process's id in its own, innermost PID namespace; 0 when it is gone."""
    for line in _read(pid, "status").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return 0


def _read(pid: int, what: str) -> str:
    try:
        with open(f"/proc/{pid}/{what}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def in_namespace_of(init: int) -> list[int]:
    """The living processes in the PID namespace of ``init``, itself first."""
    try:
        wanted = os.readlink(f"/proc/{init}/ns/pid")
    except OSError:
        return []
    found = []
    for pid in all_pids():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == wanted and state(pid) not in ("Z", "X", ""):
                found.append(pid)
        except OSError:
            continue
    return found


def tagged(variable: str, value: str) -> list[Process]:
    """Processes, other than this one, that were started with ``variable=value`` in their environment."""
    found = []
    for pid in all_pids():
        if pid != os.getpid() and environment(pid).get(variable) == value:
            try:
                found.append(Process.of(pid))
            except OSError:
                continue
    return [process for process in found if process.alive()]


def kill_and_wait(processes: Iterable[Process], *, within_s: float = 10.0) -> None:
    """SIGKILL them; back only when none is alive.  Raises :class:`SandboxError` when one does not die."""
    left = [process for process in processes if process.send(signal.SIGKILL)]
    deadline = time.monotonic() + within_s
    while left := [process for process in left if process.alive()]:
        if time.monotonic() > deadline:
            raise SandboxError(
                f"Processes {[p.pid for p in left]} do not die",
                evidence=f"{within_s:g} s after SIGKILL they are in state {[state(p.pid) for p in left]}",
                remedy="look at /proc/PID/stack; a process in state D waits for a device or a file server",
            )
        time.sleep(0.005)


def kill_session_of_child(pid: int) -> None:
    """Kill the session that a child of ``pid`` leads: the command and all that it started and did not detach."""
    children = [child for child in all_pids() if parent(child) == pid]
    for victim in all_pids():
        try:
            if int(_stat(victim)[3]) in children:
                Process.of(victim).send(signal.SIGKILL)
        except OSError:
            continue
