"""Faults of the processes of a run: ranks, launchers, agents, supervisors, found by what they are."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import ConfigError, SandboxError, SandboxMisuse, nearest
from slurm_resilience.sandbox import processes
from slurm_resilience.sandbox.processes import Process

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox

_PAGE = re.compile(r"/slurm-resilience-\d+/[^/]+/page-\d+-(\d+)$")
_LOG = re.compile(r"/attempt-\d+/rank-(\d+)\.log$")


@dataclass(frozen=True)
class Found:
    """One process of a run: where it is, and which rank it is where it is one."""

    process: Process
    node: str
    job: str
    rank: int | None = None


def kill_rank(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """kill -9; back when it is dead."""
    victim = _rank(sandbox, options)
    return _kill(victim)


def hang_rank(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """SIGSTOP: it exists and does nothing; back when it has stopped."""
    victim = _rank(sandbox, options)
    if not victim.process.send(signal.SIGSTOP):
        raise SandboxError("The rank ended before it could be stopped", evidence=f"process {victim.process.pid} is gone")
    deadline = time.monotonic() + 5
    while processes.state(victim.process.pid) not in ("T", "t"):
        if time.monotonic() > deadline:
            raise SandboxError(
                "The rank does not stop", evidence=f"state {processes.state(victim.process.pid)!r}, 5 s after SIGSTOP"
            )
        time.sleep(0.005)
    return _described(victim)


def kill_launcher(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """kill -9 of a launcher, the one process from which a node's ranks are forked."""
    return _kill(_one(sandbox, "launcher", _is_launcher, options))


def kill_agent(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """kill -9 of an agent."""
    return _kill(_one(sandbox, "agent", _is_agent, options))


def kill_supervisor(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """kill -9 of a supervisor."""
    return _kill(_one(sandbox, "supervisor", _is_supervisor, options))


def _is_launcher(argv: list[str]) -> bool:
    """The warm launcher, or a fork of it; not the same file started to be one cold rank."""
    return any(re.search(r"(^|/)runtime/launcher\.py$", word) for word in argv[:4]) and argv[-1] != "rank"


def _is_agent(argv: list[str]) -> bool:
    """`python -m slurm_resilience.runtime.agent`, not the srun that carries it."""
    return (
        argv[1:2] != ["-c"]
        and "srun" not in argv[0].rpartition("/")[2]
        and _module_of(argv) == "slurm_resilience.runtime.agent"
    )


def _is_supervisor(argv: list[str]) -> bool:
    """`slurm-resilience run …` or `python -m slurm_resilience run …`, not a shell that has these words in its script."""
    if _module_of(argv) == "slurm_resilience":
        return argv[argv.index("slurm_resilience") + 1 :][:1] == ["run"]
    return any(
        word.rpartition("/")[2] == "slurm-resilience" and argv[at + 1 :][:1] == ["run"] for at, word in enumerate(argv[:3])
    )


def _module_of(argv: list[str]) -> str:
    """What Python's -m runs; "" where there is none among its first options."""
    at = argv.index("-m") if "-m" in argv[:6] else -1
    return argv[at + 1] if 0 <= at < len(argv) - 1 else ""


def _rank(sandbox: Sandbox, options: dict[str, Any]) -> Found:
    found = _filter(sandbox, ranks(sandbox), options)
    index = options.get("index")
    chosen = [one for one in found if index is None or one.rank == index]
    if not chosen:
        there = ", ".join(f"{one.rank} on {one.node}" for one in found) or "none at all"
        raise SandboxMisuse("There is no such rank", evidence=f"wanted {_wanted(options)}; ranks that live: {there}")
    return min(chosen, key=lambda one: one.rank if one.rank is not None else -1)


def _one(sandbox: Sandbox, what: str, test: Callable[[list[str]], bool], options: dict[str, Any]) -> Found:
    found = _filter(sandbox, _find(sandbox, test), options)
    pids = {one.process.pid for one in found}
    # a launcher's ranks are its forks and look the same: the topmost process is meant
    found = [one for one in found if processes.parent(one.process.pid) not in pids]
    if not found:
        raise SandboxMisuse(f"There is no {what}", evidence=f"wanted {_wanted(options)}; no process on a node is one")
    return found[0]


def _find(sandbox: Sandbox, test: Callable[[list[str]], bool]) -> list[Found]:
    out = []
    for name, pid in _node_processes(sandbox):
        if test(processes.command_line(pid)):
            found = _found(name, pid)
            if found:
                out.append(found)
    return out


def ranks(sandbox: Sandbox) -> list[Found]:
    """Every living rank, the lowest number first; of two attempts' ranks of one number, the younger."""
    candidates: dict[int, Found] = {}
    for name, pid in _node_processes(sandbox):
        number = _rank_number(pid)
        found = _found(name, pid, number) if number is not None else None
        if found:
            candidates[pid] = found
    # data loaders and other children of a rank carry its marks too: a rank is nobody's child among the marked
    topmost = [one for pid, one in candidates.items() if processes.parent(pid) not in candidates]
    return sorted(topmost, key=lambda one: (one.rank or 0, -one.process.start))


def _rank_number(pid: int) -> int | None:
    """Which rank a process is, from whatever shows it.

    A rank that was started by exec has RESILIENCE_PAGE and RANK in its environment.  One that was forked shows its
    launcher's environment for ever; what is its own is the progress page that it maps (the agent maps all of them),
    and the log that its output goes to.
    """
    variables = processes.environment(pid)
    if "RESILIENCE_PAGE" in variables and variables.get("RANK", "").isdigit():
        return int(variables["RANK"])
    argv = processes.command_line(pid)
    if not argv or _is_agent(argv) or processes.name(pid) == "sr-launcher":
        return None
    pages = {match.group(1) for path in processes.mapped_files(pid) if (match := _PAGE.search(path))}
    if len(pages) == 1:
        return int(pages.pop())
    log = _LOG.search(processes.open_file(pid, 1)) if processes.name(pid).startswith("sr-rank-") else None
    return int(log.group(1)) if log else None


def _found(node: str, pid: int, rank: int | None = None) -> Found | None:
    try:
        process = Process.of(pid)
    except OSError:
        return None
    variables = processes.environment(pid)
    return Found(process, node, variables.get("RESILIENCE_JOB_ID") or variables.get("SLURM_JOB_ID", ""), rank)


def _node_processes(sandbox: Sandbox) -> list[tuple[str, int]]:
    state = sandbox.state()
    hosts = [state.hosts[name] for name in state.cluster.names]
    return [(host.name, pid) for host in hosts if host.alive() for pid in processes.in_namespace_of(host.pid)]


def _filter(sandbox: Sandbox, found: list[Found], options: dict[str, Any]) -> list[Found]:
    node, job = options.get("node"), options.get("job")
    if node is not None and node not in sandbox.nodes:
        raise ConfigError(f"The sandbox has no node {node!r}: {nearest(node, sandbox.nodes)}")
    return [one for one in found if node in (None, one.node) and (job is None or one.job == str(job))]


def _wanted(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items() if value is not None) or "any"


def _kill(victim: Found) -> dict[str, Any]:
    if not victim.process.send(signal.SIGKILL):
        raise SandboxError("It ended before it could be killed", evidence=f"process {victim.process.pid} is gone")
    processes.kill_and_wait([victim.process])
    return _described(victim)


def _described(victim: Found) -> dict[str, Any]:
    out: dict[str, Any] = {"pid": victim.process.pid, "node": victim.node, "job": victim.job}
    if victim.rank is not None:
        out["rank"] = victim.rank
    return out
