"""Which processes are alive under this one, and are they really gone?

Everything here is about this node and this user, read from ``/proc``.  A process is named by its number *and* its start
time, so that a number that was given out again is never mistaken for the one that was meant.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# What Slurm sends to every process of a step as a warning; a rank must not die of it before its Run can save.
WARNING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Process(NamedTuple):
    """One process at the moment of the look: ``started`` is in clock ticks since boot, ``state`` as in ps."""

    pid: int
    parent: int
    state: str
    started: int


def _prctl(option: int, value: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def become_subreaper() -> None:
    """From now on, orphans among our descendants become our children.  Source: prctl(2)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Get ``sig`` when ``parent`` ends, and at once if it is gone already (the race between fork and prctl)."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def set_name(name: str) -> None:
    """The name that ps and top show (15 bytes)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def look(pid: int) -> Process | None:
    """The process with this number, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything; what follows its last ")" may not.  Source: proc(5).
    fields = raw[raw.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def myself() -> Process:
    """This process."""
    found = look(os.getpid())
    if found is None:
        raise OSError("/proc is not mounted, or shows other processes than ours")
    return found


def snapshot() -> dict[int, Process]:
    """All processes that /proc shows."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = look(int(name))
            if found is not None:
                table[found.pid] = found
    return table


def is_alive(process: Process) -> bool:
    """Whether it still runs; a zombie does not, it only waits for its parent to take note."""
    now = look(process.pid)
    return now is not None and now.started == process.started and now.state not in ("Z", "X")


def descendants(root: int, *, spare: Iterable[int] = (), spare_trees: Iterable[int] = ()) -> list[Process]:
    """Living processes under ``root`` without it; those in ``spare`` are left out, what is below them is not.

    Those in ``spare_trees`` are left out with all that is below them.
    """
    table = snapshot()
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    spared, trees = set(spare), set(spare_trees)
    found: list[Process] = []
    open_ends = [root]
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            if child.pid in trees:
                continue
            open_ends.append(child.pid)
            if child.pid not in spared and child.state not in ("Z", "X"):
                found.append(child)
    return found


def send_signal(process: Process, sig: int) -> bool:
    """Signal exactly this process; False when it is gone, or is not ours to signal."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = look(process.pid)
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(fd, sig)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def carrying(variables: Mapping[str, str]) -> list[Process]:
    """Living processes of this user that were started with all these environment variables."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    user = os.geteuid()
    found = []
    for process in snapshot().values():
        if process.state in ("Z", "X"):
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process.pid}").st_uid != user:
                continue
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    found.append(process)
    return found


def reap() -> list[tuple[int, int]]:
    """Take note of all ended children: ``(pid, wait status)``.  Never waits."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    header: str = "",
    cwd: str | None = None,
    stdin: int | None = None,
    keep: Sequence[int] = (),
    ignore: Sequence[int] = WARNING_SIGNALS,
    outlive: bool = False,
) -> int:
    """Start a program in a session of its own that dies with us, unless it may ``outlive`` us.

    Returns its number without waiting for the exec.
    Output is appended to ``log``.  What goes wrong on the way (no such program, no such folder) is its last output, and it
    ends with 126 or 127 as in a shell.  Unlike subprocess, this never waits: a program on a file system that hangs must
    not hang us.
    """
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        _exec(argv, env, log, header, cwd, stdin, keep, ignore, None if outlive else me)
    return pid


def _exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    header: str,
    cwd: str | None,
    stdin: int | None,
    keep: Sequence[int],
    ignore: Sequence[int],
    parent: int | None,
) -> NoReturn:
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        if parent is not None:
            die_with_parent(parent)
        os.setsid()
        for sig in (*WARNING_SIGNALS, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(sig, signal.SIG_IGN if sig in ignore else signal.SIG_DFL)
        if stdin is None:
            stdin = os.open(os.devnull, os.O_RDONLY)
        log.parent.mkdir(parents=True, exist_ok=True)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(stdin, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        close_others(keep)
        for fd in keep:
            os.set_inheritable(fd, True)
        if header:
            os.write(1, header.encode() + b"\n")
        if cwd is not None:
            os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(env))  # noqa: S606 -- the user's own command, without a shell
    except BaseException as error:  # noqa: BLE001 -- the child of a fork has nobody to raise to
        # A folder on PATH that may not be read makes "not found" look like "not permitted".
        lost = isinstance(error, PermissionError) and "/" not in argv[0] and shutil.which(argv[0], path=env.get("PATH")) is None
        code = 127 if lost or isinstance(error, FileNotFoundError) else 126
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(code)


def close_others(keep: Iterable[int]) -> None:
    """Close every file descriptor from 3 on, except those to keep."""
    low = 3
    for fd in sorted(fd for fd in keep if fd >= 3):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX") if not os.path.isdir("/proc/self/fd") else _highest_fd() + 1)


def _highest_fd() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def exit_of(status: int) -> tuple[int, str]:
    """Python's exit code (0–255, or minus the signal) and the signal's name ("" for none) of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code, ""
    try:
        return code, signal.Signals(-code).name
    except ValueError:
        return code, f"SIG{-code}"
