"""The parent of an agent: whatever happens to the agent, nothing that it started outlives it.

Ranks and launcher die with the agent by the kernel's hand (PR_SET_PDEATHSIG), but their own children do not: data loader
workers, children with a session of their own.  They become the guardian's children then, and it kills them.  It also writes
the agent's log, because the log lies on a shared file system that may hang, and the agent may not.

An agent that is stopped, or stuck in the kernel, cannot stop its ranks when its lease ends: the guardian does that too, unless
it was stopped as well; then whoever wakes first looks at the agent's lease.

One process may outlive the agent: the supervisor that it started in place of one that was lost.  The guardian waits for it,
since Slurm would kill it with the step.

When the guardian itself is killed, the agent gets SIGHUP, and does the same.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from slurm_resilience.runtime.deadman import DeadMan
from slurm_resilience.runtime.lease import FROZEN_S
from slurm_resilience.runtime.node_folder import remove_if_free
from slurm_resilience.runtime.processes import (
    WARNING_SIGNALS,
    become_subreaper,
    descendants,
    die_with_parent,
    is_alive,
    look,
    reap,
    send_signal,
    set_name,
)

_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.25
_AWAKE_S = 0.5  # after a pause of our own, time for the agent to look first: then it keeps its launcher and its say


def guard(log: Path, folder: Path) -> tuple[int, DeadMan]:
    """Fork; returns in the child, the agent to be, with its guardian's number and the page to hold.  The parent never returns.

    What the child writes to standard error lands in ``log``; writing there never blocks it.  The node folder that it leaves
    behind when it is killed is removed, unless another agent has taken it over.
    """
    become_subreaper()
    for sig in (*WARNING_SIGNALS, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    read, write = os.pipe2(os.O_CLOEXEC)
    guardian, deadman = os.getpid(), DeadMan()
    pid = os.fork()
    if pid:
        os.close(write)
        set_name("sr-guardian")
        _watch(pid, read, log, folder, deadman)
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
    return guardian, deadman


def _watch(agent: int, log_pipe: int, log: Path, folder: Path, deadman: DeadMan) -> NoReturn:
    """Copy the log until the agent ends, stop its ranks when it cannot, kill what it left, and end as it did."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.set_blocking(log_pipe, False)
    ended = os.pidfd_open(agent)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(log_pipe, select.POLLIN)
    looked = awake_since = time.monotonic()
    while True:
        ready = {fd for fd, _ in poll.poll(_LOOK_EVERY_S * 1000)}
        if ended in ready:
            break
        now = time.monotonic()
        if now - looked > FROZEN_S:
            awake_since = now
        looked = now
        if deadman.passed(now) and now - awake_since > _AWAKE_S:
            _stop_ranks(agent, deadman, out)
        if log_pipe in ready and not _copy(log_pipe, out):
            poll.unregister(log_pipe)
    _, status = os.waitpid(agent, 0)
    killed, left = kill_all(_PATIENCE_S, spare_trees=deadman.heirs())
    remove_if_free(folder)
    _copy(log_pipe, out)
    code = os.waitstatus_to_exitcode(status)
    if code != 0 or killed or left:
        _note(out, f"the agent ended with {code}; killed {killed} processes that it left, {left} live")
    _wait_for(deadman.heirs())
    os._exit(code if code >= 0 else 128 - code)


def _wait_for(heirs: set[int]) -> None:
    """Wait for their end; they are our children since the agent ended."""
    while any((found := look(pid)) is not None and found.parent == os.getpid() and is_alive(found) for pid in heirs):
        reap()
        time.sleep(_LOOK_EVERY_S)
    kill_all(_PATIENCE_S)


def _stop_ranks(agent: int, deadman: DeadMan, out: int) -> None:
    """The agent has not stopped in time what another node may be given now."""
    killed, left = kill_all(1.0, spare={agent, *deadman.spared()}, spare_trees=deadman.heirs())
    if killed or left:
        _note(out, f"the agent does not move, and its lease is over: killed {killed} processes in its place, {left} live")


def _note(out: int, text: str) -> None:
    os.write(out, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n".encode())


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


def kill_all(patience_s: float, *, spare: Iterable[int] = (), spare_trees: Iterable[int] = ()) -> tuple[int, int]:
    """Kill every descendant but ``spare``, and wait for the proof: how many were killed, and how many still live.

    ``spare_trees`` are left alone with all that is below them.
    """
    me = os.getpid()
    deadline = time.monotonic() + patience_s
    killed: set[int] = set()
    while True:
        reap()
        alive = descendants(me, spare=spare, spare_trees=spare_trees)
        for process in alive:
            if send_signal(process, signal.SIGKILL):
                killed.add(process.pid)
        if not alive or time.monotonic() > deadline:
            return len(killed), len(alive)
        time.sleep(0.005)
