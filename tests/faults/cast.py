"""Who plays in a run: its supervisor, agents, launchers and ranks, found among all processes of this machine.

The nodes of a sandbox have PID namespaces of their own; seen from the machine, their processes are processes like
others.  Parents, names and command lines tell who is who; start times keep a reused number from being taken for the
same process.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.sandbox.processes import Process, all_pids, command_line, name, open_file, parent

AGENT, LAUNCHER = "sr-agent", "sr-launcher"
_LOG = re.compile(r"/attempt-(\d+)/rank-(\d+)\.log$")


@dataclass(frozen=True)
class Rank:
    """A living rank.  Its output goes to the log of its attempt, which tells which one it is."""

    process: Process
    node: str
    attempt: int
    rank: int


@dataclass(frozen=True)
class Cast:
    """The living processes of one run at one moment; launchers are those that have ranks now."""

    supervisors: list[Process]
    agents: dict[str, Process]
    launchers: dict[str, Process]
    ranks: list[Rank]

    def everybody(self) -> list[str]:
        out = [f"supervisor {process.pid}" for process in self.supervisors]
        out += [f"agent {process.pid} of {node}" for node, process in self.agents.items()]
        out += [f"launcher {process.pid} of {node}" for node, process in self.launchers.items()]
        out += [f"rank {each.rank} of attempt {each.attempt} on {each.node}, {each.process.pid}" for each in self.ranks]
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
    ours: dict[Process, list[str]] = {}
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
            ours[process] = argv

    cast = Cast([], {}, {}, [])
    for process, argv in ours.items():
        if name(process.pid) == AGENT:
            node = option(argv, "--node") or "?"
            cast.agents[node] = process
            for child in children.get(process.pid, []):
                grandchildren = [rank_of(each, node) for each in children.get(child.pid, [])]
                ranks = [each for each in [rank_of(child, node), *grandchildren] if each is not None]
                cast.ranks.extend(ranks)
                if ranks and name(child.pid) == LAUNCHER:
                    cast.launchers[node] = child
        elif is_supervisor(argv):
            cast.supervisors.append(process)
    return cast


def rank_of(process: Process, node: str) -> Rank | None:
    match = _LOG.search(open_file(process.pid, 1))
    return Rank(process, node, int(match[1]), int(match[2])) if match else None


def is_supervisor(argv: list[str]) -> bool:
    """`slurm-resilience run …`, as a console script or as a module, or one that an agent has started in its place.

    Not a shell that has these words in its script.
    """
    if argv[1:3] == ["-m", "slurm_resilience.runtime.takeover"]:
        return True
    words = argv[: argv.index("--")] if "--" in argv else argv
    at = next(
        (at for at, word in enumerate(words[:4]) if os.path.basename(word) in ("slurm-resilience", "slurm_resilience")), None
    )
    return at is not None and words[at + 1 : at + 2] == ["run"] and os.path.basename(words[0]).startswith("python")
