"""Who plays in a run: its supervisor, agents, launchers and ranks, found among all processes of this machine.

The nodes of a sandbox have PID namespaces of their own; seen from the machine, their processes are processes like
others.  Parents, names and command lines tell who is who; start times keep a reused number from being taken for the
same process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.sandbox.processes import Process, all_pids, command_line, name, parent

AGENT_MODULE = "slurm_resilience.runtime.agent"
LAUNCHER_NAME = "sr-launcher"


@dataclass(frozen=True)
class Cast:
    """The living processes of one run at one moment, by node."""

    supervisors: list[Process]
    agents: dict[str, Process]
    launchers: dict[str, Process]
    ranks: dict[str, list[Process]]

    def everybody(self) -> list[tuple[str, Process]]:
        out = [("supervisor", process) for process in self.supervisors]
        out += [(f"agent of {node}", process) for node, process in self.agents.items()]
        out += [(f"launcher of {node}", process) for node, process in self.launchers.items()]
        out += [(f"rank on {node}", process) for node, each in self.ranks.items() for process in each]
        return out


def option(argv: list[str], flag: str) -> str | None:
    """The value of ``--flag value`` or ``--flag=value``."""
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return None


def look(run_dir: Path) -> Cast:
    """The cast of the run in ``run_dir`` now.  Zombies do not play."""
    folder = os.fspath(run_dir)
    children: dict[int, list[Process]] = {}
    ours: dict[int, tuple[Process, list[str]]] = {}
    for pid in all_pids():
        try:
            process = Process.of(pid)
        except OSError:
            continue
        if not process.alive():
            continue
        children.setdefault(parent(pid), []).append(process)
        argv = command_line(pid)
        if option(argv, "--run-dir") == folder:
            ours[pid] = (process, argv)

    cast = Cast([], {}, {}, {})
    for process, argv in ours.values():
        if AGENT_MODULE in argv:
            node = option(argv, "--node") or "?"
            cast.agents[node] = process
            cast.ranks[node] = []
            for child in children.get(process.pid, []):
                if name(child.pid) == LAUNCHER_NAME:
                    cast.launchers[node] = child
                    cast.ranks[node] += [rank for rank in children.get(child.pid, []) if name(rank.pid) != LAUNCHER_NAME]
                elif command_line(child.pid)[-1:] == ["rank"]:
                    cast.ranks[node].append(child)
        elif is_supervisor(argv):
            cast.supervisors.append(process)
    return cast


def is_supervisor(argv: list[str]) -> bool:
    """`slurm-resilience run …`, as a console script or as a module; not the srun that carries an agent."""
    before = argv[: argv.index("--")] if "--" in argv else argv
    program = any(os.path.basename(word) in ("slurm-resilience", "slurm_resilience") for word in before[:4])
    return program and "run" in before[:5]
