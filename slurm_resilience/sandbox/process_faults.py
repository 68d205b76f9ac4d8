"""Faults of the processes of a run: ranks, launchers, agents, supervisors, found by what they are."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import ConfigError, SandboxError, nearest
from slurm_resilience.sandbox import processes
from slurm_resilience.sandbox.processes import Process

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox


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
    return any(re.search(r"(^|/)runtime/launcher\.py$", word) for word in argv[:4])


def _is_agent(argv: list[str]) -> bool:
    return "slurm_resilience.runtime.agent" in argv[:5]


def _is_supervisor(argv: list[str]) -> bool:
    """`slurm-resilience run …` or `python -m slurm_resilience run …`, not a shell that has these words in its script."""
    for index, word in enumerate(argv[:4]):
        program = word.rpartition("/")[2]
        if argv[index + 1 : index + 2] == ["run"]:
            if program == "slurm-resilience":
                return True
            if word == "slurm_resilience" and index and argv[index - 1] == "-m":
                return True
    return False


def _rank(sandbox: Sandbox, options: dict[str, Any]) -> Found:
    found = _filter(sandbox, ranks(sandbox), options)
    index = options.get("index")
    chosen = [one for one in found if index is None or one.rank == index]
    if not chosen:
        there = ", ".join(f"{one.rank} on {one.node}" for one in found) or "none at all"
        raise SandboxError("There is no such rank", evidence=f"wanted {_wanted(options)}; ranks that live: {there}")
    return min(chosen, key=lambda one: one.rank if one.rank is not None else -1)


def _one(sandbox: Sandbox, what: str, test: Callable[[list[str]], bool], options: dict[str, Any]) -> Found:
    found = _filter(sandbox, _find(sandbox, test), options)
    pids = {one.process.pid for one in found}
    # a launcher's ranks are its forks and look the same: the topmost process is meant
    found = [one for one in found if processes.parent(one.process.pid) not in pids]
    if not found:
        raise SandboxError(f"There is no {what}", evidence=f"wanted {_wanted(options)}; no process on a node is one")
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
    """Every living rank: a process that has mapped the page that its RESILIENCE_PAGE, or an agent's naming, says is its own."""
    out: dict[tuple[str, int], Found] = {}
    for name, pid in _node_processes(sandbox):
        variables = processes.environment(pid)
        if "RESILIENCE_PAGE" in variables and variables.get("RANK", "").isdigit():
            found = _found(name, pid, int(variables["RANK"]))
            # children of a rank (data loaders) inherit its environment; the rank is the oldest
            if found and (name, int(variables["RANK"])) not in out:
                out[name, int(variables["RANK"])] = found
    return sorted(out.values(), key=lambda one: one.rank or 0)


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
