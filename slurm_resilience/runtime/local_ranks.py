"""The ranks of one attempt on this node: pages, requests to start them, and how each ended."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.page import PageReader, Phase, Progress
from slurm_resilience.progress.sections import Frame, Seen
from slurm_resilience.runtime.blind import Blind
from slurm_resilience.runtime.command import PythonCommand, parse_python
from slurm_resilience.runtime.kernel import MemoryKills, killed_for_memory, messages
from slurm_resilience.runtime.launcher_link import LauncherLink
from slurm_resilience.runtime.messages import Exit, Launch
from slurm_resilience.runtime.node_folder import NodeFolder
from slurm_resilience.runtime.outside import Outside
from slurm_resilience.runtime.processes import Process, exit_of
from slurm_resilience.runtime.rank_environment import rank_environment

_TAIL_LINES = 20
_TAIL_BYTES = 16_384
_LINE_CHARACTERS = 1_000


@dataclass
class LocalRank:
    """One rank.  ``process`` is None until it was started; ``ended`` is its Exit once it did."""

    rank: int
    page: PageReader
    log: Path
    stacks: Path
    environment: dict[str, str]
    request: dict[str, Any]
    link: LauncherLink | None = None
    process: Process | None = None
    pid: int | None = None
    gone: bool = False
    ended: Exit | None = None


@dataclass
class LocalRanks:
    """One attempt on this node.  ``cold`` says why a rank was not forked, "" while all were."""

    launch: Launch
    command: PythonCommand | None
    ranks: dict[int, LocalRank]
    began: float = field(default_factory=time.monotonic)
    cold: str = ""
    announced: bool = False
    outside: Outside = field(default_factory=Outside)
    memory: MemoryKills = field(default_factory=MemoryKills)

    @classmethod
    def prepare(
        cls, launch: Launch, folder: NodeFolder, *,
        base: Mapping[str, str], run_dir: Path, run_id: str, node: str, job_id: str, restart: int,
    ) -> LocalRanks:  # fmt: skip
        """Make the pages and the requests.  Raises OSError when the node's memory has no room for a page."""
        found = cls(launch, parse_python(launch.argv), {})
        command = found.command
        try:
            for rank, local_rank in launch.ranks:
                page = PageReader(folder.page(launch.attempt, rank))
                contract = RankContract(
                    run_dir=str(run_dir), run_id=run_id, attempt=launch.attempt, restart_count=restart, job_id=job_id,
                    node=node, page=str(page.path), facts=str(folder.facts), checkpoints=launch.checkpoints,
                    settings=launch.settings, plan=launch.plan,
                )  # fmt: skip
                log = run_dir / "logs" / f"attempt-{launch.attempt:04d}" / f"rank-{rank:05d}.log"
                stacks = folder.stacks(launch.attempt, rank)
                environment = rank_environment(base, launch, rank=rank, local_rank=local_rank, contract=contract)
                request = {
                    "attempt": launch.attempt, "rank": rank, "page": contract.page, "facts": contract.facts,
                    "imports": str(folder.imports(launch.attempt)) if local_rank == 0 else "",
                    "stacks": str(stacks), "log": str(log), "header": launch.header, "cwd": launch.cwd, "argv": launch.argv,
                    "form": command.form if command else "", "target": command.target if command else "",
                    "args": list(command.args) if command else [],
                }  # fmt: skip
                found.ranks[rank] = LocalRank(rank, page, log, stacks, environment, request)
        except BaseException:
            found.close()
            raise
        return found

    @property
    def attempt(self) -> int:
        return self.launch.attempt

    def alive(self) -> list[LocalRank]:
        """Ranks that were started and have not ended."""
        return [rank for rank in self.ranks.values() if rank.pid is not None and not rank.gone]

    def all_started(self) -> bool:
        """Every rank has, or had, a process."""
        return all(rank.pid is not None for rank in self.ranks.values())

    def by_pid(self, pid: int) -> LocalRank | None:
        """The rank that is this process."""
        return next((rank for rank in self.ranks.values() if rank.pid == pid and not rank.gone), None)

    def progress(self, blind: Blind) -> dict[str, Any]:
        """What a beat says of the ranks that are alive.  Time in which this process did not look does not count as silence."""
        now, out = time.monotonic(), {}
        pages = [(rank, rank.page.read()) for rank in self.alive()]
        silent = [(rank.rank, rank.process) for rank, seen in pages if rank.process is not None and is_from_outside(seen)]
        if silent:
            self.outside.look(silent, now)
        for rank, seen in pages:
            out[str(rank.rank)] = [
                seen.step, int(seen.phase), _seconds(seen.age_s, blind, now), seen.done, round(seen.phase_age_s, 3), seen.beats,
                [_section(frame, blind, now) for frame in seen.frames], round(seen.own_s, 6), seen.own_count,
                round(self.outside.quiet_s(rank.rank, now), 1) if is_from_outside(seen) else 0.0,
            ]  # fmt: skip
        return out

    def seen(self) -> dict[str, Any]:
        """How often each kind of work was seen on this node, and the longest silence in it."""
        out: dict[str, Seen] = {}
        for rank in self.alive():
            for name, seen in rank.page.seen().items():
                before = out.get(name, seen)
                out[name] = Seen(max(before.times, seen.times), max(before.longest_s, seen.longest_s))
        return {name: [seen.times, round(seen.longest_s, 4)] for name, seen in out.items() if seen.times}

    def order(self, *, stop: bool, save: int, deadline: float | None, cause: str) -> None:
        """Write an order into all pages."""
        for rank in self.ranks.values():
            rank.page.order(stop=stop, save=save, deadline=deadline, cause=cause)

    def exit_of(self, rank: LocalRank, status: int | None) -> Exit:
        """How a rank ended; with ``status`` None its parent died and took the exit code with it."""
        code, name = exit_of(status) if status is not None else (-9, "SIGKILL")
        seen = rank.page.read()
        tail = [] if status is not None else ["[the launcher died, and its ranks with it]"]
        return Exit(self.attempt, rank.rank, code, name, seen.done, time.time(), tail, seen.step)

    def killed_for_memory(self, rank: LocalRank) -> str:
        """How we know that a rank that got SIGKILL was killed for its memory; "" when nothing says so."""
        line = killed_for_memory(f"sr-rank-{rank.rank}"[:15], rank.pid, messages(self.began))
        if line:
            return f"the kernel says: {line}"
        count = self.memory.since()
        return f"the memory controller of this job killed {count} process{'es' if count > 1 else ''} here" if count else ""

    def close(self) -> None:
        """Remove the pages."""
        for rank in self.ranks.values():
            rank.page.close()
            rank.stacks.unlink(missing_ok=True)


def is_from_outside(seen: Progress) -> bool:
    """Whether the rank itself says too little: nothing at all, not yet that it trains, or nothing any more."""
    return seen.done or not seen.beats or (seen.phase is Phase.INIT and seen.step < 0)


def _section(frame: Frame, blind: Blind, now: float) -> list[Any]:
    """A frame on the wire: a limit of null is learned, -1 is none."""
    limit = None if math.isnan(frame.limit_s) else -1.0 if math.isinf(frame.limit_s) else frame.limit_s
    return [frame.name, limit, _seconds(frame.own_s, blind, now), _seconds(frame.total_s, blind, now), frame.times]


def _seconds(seconds: float, blind: Blind, now: float) -> float:
    return round(max(0.0, seconds - blind.within(seconds, now)), 3)


def tail(path: Path) -> list[str]:
    """The last lines of a log, bounded in number and in length; none where there is no log.

    Where the interpreter said itself why it died, that and the stack below it.
    """
    try:
        with open(path, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - _TAIL_BYTES))
            raw = file.read(_TAIL_BYTES)
    except OSError:
        return []
    lines = raw.decode(errors="replace").splitlines()
    fatal = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    last = lines[fatal[-1] :][:_TAIL_LINES] if fatal else lines[-_TAIL_LINES:]
    return [line[:_LINE_CHARACTERS] for line in last]
