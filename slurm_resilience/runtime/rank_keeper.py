"""Starts the ranks of one attempt on this node, warm or cold, and tells how each of them ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_resilience.runtime.cold import start_cold
from slurm_resilience.runtime.command import PythonCommand, same_interpreter
from slurm_resilience.runtime.launcher_link import LauncherLink
from slurm_resilience.runtime.launchers import Launchers
from slurm_resilience.runtime.local_ranks import LocalRank, LocalRanks, tail
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import Exit, Launched, LaunchFailed, Message
from slurm_resilience.runtime.node_folder import NodeFolder
from slurm_resilience.runtime.preload import ImportWatch, write_learned
from slurm_resilience.runtime.processes import look

_TAIL_S = 0.5
_LEARN_AFTER_S = 20.0  # a program without a Run never says that it took a step


class RankKeeper:
    """Keeps :attr:`ranks`, which is None while nothing runs here.

    ``tell(message)`` goes to the supervisor; ``failed(why)`` asks for a stop, since not all ranks could be started.
    """

    def __init__(
        self, loop: Loop, folder: NodeFolder, run_dir: Path, *, command: PythonCommand | None, wrap: Sequence[str],
        tell: Callable[[Message], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop, self._folder, self._run_dir = loop, folder, run_dir
        self._command, self._wrap = command, wrap
        self._tell, self._failed = tell, failed
        self._imports: ImportWatch | None = None
        self._learned: list[str] = []
        self._tails = 0
        self.ranks: LocalRanks | None = None

    @property
    def attempt(self) -> int:
        """The attempt that is here, 0 for none."""
        return self.ranks.attempt if self.ranks is not None else 0

    def alive(self) -> list[LocalRank]:
        """Ranks that were started and have not ended."""
        return self.ranks.alive() if self.ranks is not None else []

    def pids(self) -> set[int]:
        """The processes of all ranks that were started, alive or not."""
        ranks = self.ranks.ranks.values() if self.ranks is not None else ()
        return {rank.pid for rank in ranks if rank.pid is not None}

    def silent(self) -> bool:
        """Whether nothing is expected of any rank any more, not even its last words."""
        return not self._tails and not self.alive()

    # --- starting -----------------------------------------------------------------------------------------------------

    def start(self, ranks: LocalRanks, launchers: Launchers) -> None:
        """Start them all: forked where the launcher can, cold with the reason where it cannot."""
        self.ranks = ranks
        self._imports = ImportWatch(self._folder.imports(ranks.attempt))
        link = launchers.current
        why = launchers.reason if launchers.warm is not True else ""
        if not why and not same_interpreter(ranks.command, self._command):
            why = "another interpreter, or other flags of it, than those that the launcher was started with"
        for rank in ranks.ranks.values():
            if why or link is None:
                self._start_cold(ranks, rank, why or "no launcher")
            else:
                rank.link = link
                link.pending += 1
                link.send(m="fork", env=rank.environment, **rank.request)
        self._announce(ranks)

    def _start_cold(self, ranks: LocalRanks, rank: LocalRank, why: str) -> None:
        ranks.cold = why
        rank.link = None
        try:
            rank.pid = start_cold(rank, ranks, self._wrap)
        except OSError as error:
            self._give_up(ranks, f"cannot start rank {rank.rank}: {error}")
            return
        rank.process = look(rank.pid)

    def _give_up(self, ranks: LocalRanks, why: str) -> None:
        if not ranks.announced:
            ranks.announced = True
            self._tell(LaunchFailed(ranks.attempt, why))
            self._failed(why)

    def _announce(self, ranks: LocalRanks) -> None:
        if ranks.announced or not ranks.all_started():
            return
        ranks.announced = True
        pids = {str(rank.rank): rank.pid for rank in ranks.ranks.values()}
        self._tell(Launched(ranks.attempt, pids, not ranks.cold, ranks.cold, round(time.monotonic() - ranks.began, 4)))

    # --- the launcher -------------------------------------------------------------------------------------------------

    def forked(self, attempt: int, number: int, pid: int) -> None:
        """The launcher forked a rank."""
        if self.ranks is not None and self.ranks.attempt == attempt:
            rank = self.ranks.ranks[number]
            rank.pid, rank.process = pid, look(pid)
            self._announce(self.ranks)

    def not_forked(self, attempt: int, number: int, why: str) -> None:
        """The launcher may not fork this rank."""
        if self.ranks is not None and self.ranks.attempt == attempt:
            self._start_cold(self.ranks, self.ranks.ranks[number], why)
            self._announce(self.ranks)

    def lost(self, link: LauncherLink) -> None:
        """A launcher died, and its ranks with it: those that it can no longer report end here."""
        if self.ranks is None:
            return
        own = [rank for rank in self.ranks.ranks.values() if rank.link is link]
        for rank in own:
            if rank.pid is not None and not rank.gone and look(rank.pid) is None:
                self._ended(self.ranks, rank, None)
        if any(rank.pid is None for rank in own):
            self._give_up(self.ranks, "the launcher died while it was forking")

    def learn(self, now: float, launchers: Launchers) -> None:
        """Have the next launcher know what these ranks had to import by themselves."""
        ranks = self.ranks
        if ranks is None or self._imports is None:
            return
        first = ranks.ranks[min(ranks.ranks)]
        if first.gone or (first.page.read().step < 1 and now < ranks.began + _LEARN_AFTER_S):
            return
        fresh = self._imports.fresh()
        if fresh:
            self._learned = [*dict.fromkeys([*self._learned, *fresh])]
            if 0 in ranks.ranks:
                run_dir, names = self._run_dir, [*dict.fromkeys([*launchers.learned, *self._learned])]
                self._loop.aside(lambda: write_learned(run_dir, names), lambda _: None, within_s=10.0)
        if self._learned:
            launchers.renew(self._learned)

    # --- ending -------------------------------------------------------------------------------------------------------

    def ended(self, pid: int, status: int, *, killed: bool) -> None:
        """A process ended; if it was a rank, that is told, unless we killed it ourselves."""
        rank = self.ranks.by_pid(pid) if self.ranks is not None else None
        if self.ranks is not None and rank is not None:
            if killed:
                rank.gone = True
            else:
                self._ended(self.ranks, rank, status)

    def _ended(self, ranks: LocalRanks, rank: LocalRank, status: int | None) -> None:
        rank.gone = True
        found = ranks.exit_of(rank, status)
        log = rank.log
        self._tails += 1

        def tell(words: list[Any] | None) -> None:
            self._tails -= 1
            lines, oom = words or ([], "")
            rank.ended = Exit(**{**vars(found), "tail": [*lines, *found.tail], "oom": oom})
            self._tell(rank.ended)

        def last_words() -> list[Any]:
            return [tail(log), ranks.killed_for_memory(rank) if found.signal == "SIGKILL" else ""]

        self._loop.aside(last_words, tell, within_s=_TAIL_S)

    def ends(self) -> list[Exit]:
        """How the ranks of this attempt ended, so far."""
        return [rank.ended for rank in (self.ranks.ranks.values() if self.ranks else ()) if rank.ended is not None]

    def discard(self) -> None:
        """Nothing of the attempt is alive: remove its pages and forget it."""
        if self.ranks is not None:
            imports = self._folder.imports(self.ranks.attempt)
            self.ranks.close()
            if imports.exists():
                os.unlink(imports)
        self.ranks, self._imports = None, None
