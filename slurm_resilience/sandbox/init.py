"""PID 1 of a sandbox host: makes the namespaces, mounts what differs from the machine, starts one command, reaps.

Started as a program (see :mod:`slurm_resilience.sandbox.node`): the first process enters the host's network
namespace, unshares the others, forks the init into them, prints the init's process id as the machine sees it, and
ends.  The init stays until it is killed, and with it dies, by the kernel's own rule, everything on that host.

Standard library only.  An orphan that is not reaped stays a zombie for ever, and "nothing of the job is left"
would never be true: slurmd as PID 1 reaps nobody.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from slurm_resilience.sandbox import kernel

_CHILDREN_ONLY = {signal.SIGCHLD}


def boot(spec: dict[str, Any]) -> int:
    """Make the host; the init's process id.  Raises OSError naming the step that failed."""
    if spec["cgroup"]:
        with open(os.path.join(spec["cgroup"], "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    fd = os.open(spec["netns"], os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(fd, kernel.CLONE_NEWNET)
    os.close(fd)
    kernel.unshare(kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    if spec["clock_offset_s"] is not None:
        kernel.unshare(kernel.CLONE_NEWTIME)
        with open("/proc/self/timens_offsets", "w", encoding="ascii") as file:
            file.write("monotonic {} 0\nboottime {} 0\n".format(*spec["clock_offset_s"]))
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _become_init(spec, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        answer = pipe.read().decode(errors="replace")
    if answer != "ready":
        os.waitpid(pid, 0)
        raise OSError(answer or "the init died before it was ready")
    return pid


def _become_init(spec: dict[str, Any], ready: int) -> NoReturn:
    try:
        os.setsid()
        os.umask(0o022)
        _redirect(spec["log"])
        kernel.set_process_name("sandbox-init")
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_SLAVE)
        for entry in spec["mounts"]:
            kernel.mount(*entry)
        socket.sethostname(spec["host"])
        os.chdir("/")
        signal.pthread_sigmask(signal.SIG_BLOCK, _CHILDREN_ONLY)
        if spec["command"]:
            _start(spec["command"], spec["environment"])
        os.write(ready, b"ready")
        os.close(ready)
    except BaseException as error:  # noqa: BLE001  the starter is told, whatever it was
        os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    _reap_forever()


def _redirect(log: str) -> None:
    source = os.open("/dev/null", os.O_RDONLY)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(source, 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(source)
    os.close(sink)


def _start(command: list[str], environment: dict[str, str]) -> None:
    """Start the host's daemon in a session of its own.  That it ends is its own affair: this host lives on."""
    if os.fork() == 0:
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _CHILDREN_ONLY)
            kernel.default_signals()
            os.execve(command[0], command, environment)  # noqa: S606
        except OSError as error:
            print(f"sandbox-init: cannot start {command}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)


def _reap_forever() -> NoReturn:
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait(_CHILDREN_ONLY)


def main() -> NoReturn:
    """``argv[1]`` is the specification as JSON; stdout gets the init's process id or stderr the reason."""
    try:
        pid = boot(json.loads(sys.argv[1]))
    except OSError as error:
        print(error.strerror or str(error), file=sys.stderr)
        sys.exit(1)
    print(pid, flush=True)
    os._exit(0)
