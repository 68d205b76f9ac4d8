"""The parent of an agent: whatever happens to the agent, nothing that it started outlives it.

Ranks and launcher die with the agent by the kernel's hand (PR_SET_PDEATHSIG), but their own children do not: data loader
workers, children with a session of their own.  They become the guardian's children then, and it kills them.  It also writes
the agent's log, because the log lies on a shared file system that may hang, and the agent may not.

When the guardian itself is killed, the agent gets SIGHUP, and does the same.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import NoReturn

from slurm_resilience.runtime.node_folder import remove_if_free
from slurm_resilience.runtime.processes import (
    WARNING_SIGNALS,
    become_subreaper,
    descendants,
    die_with_parent,
    reap,
    send_signal,
    set_name,
)

_PATIENCE_S = 10.0


def guard(log: Path, folder: Path) -> int:
    """Fork; returns in the child, the agent to be, with the number of its guardian.  The parent never returns.

    What the child writes to standard error lands in ``log``; writing there never blocks it.  The node folder that it leaves
    behind when it is killed is removed, unless another agent has taken it over.
    """
    become_subreaper()
    for sig in (*WARNING_SIGNALS, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    read, write = os.pipe2(os.O_CLOEXEC)
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write)
        set_name("sr-guardian")
        _watch(pid, read, log, folder)
    signal.signal(signal.SIGHUP, lambda *_: None)
    die_with_parent(guardian, signal.SIGHUP)
    set_name("sr-agent")
    os.close(read)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.set_blocking(write, False)
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    os.close(null)
    return guardian


def _watch(agent: int, log_pipe: int, log: Path, folder: Path) -> NoReturn:
    """Copy the log until the agent ends, kill what it left, and end as it did."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.set_blocking(log_pipe, False)
    ended = os.pidfd_open(agent)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(log_pipe, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ended in ready:
            break
        if not _copy(log_pipe, out):
            poll.unregister(log_pipe)
    _, status = os.waitpid(agent, 0)
    killed, left = kill_all(_PATIENCE_S)
    remove_if_free(folder)
    _copy(log_pipe, out)
    code = os.waitstatus_to_exitcode(status)
    if code != 0 or killed or left:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.write(out, f"{now} the agent ended with {code}; killed {killed} processes that it left, {left} live\n".encode())
    os._exit(code if code >= 0 else 128 - code)


def _copy(source: int, target: int) -> bool:
    """What is in the pipe now; False at its end."""
    while True:
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        os.write(target, data)


def kill_all(patience_s: float) -> tuple[int, int]:
    """Kill every descendant, and wait for the proof: how many were killed, and how many still live."""
    me = os.getpid()
    deadline = time.monotonic() + patience_s
    killed: set[int] = set()
    while True:
        reap()
        alive = descendants(me)
        for process in alive:
            if send_signal(process, signal.SIGKILL):
                killed.add(process.pid)
        if not alive or time.monotonic() > deadline:
            return len(killed), len(alive)
        time.sleep(0.005)
