"""What this node can say about an incident before its traces are gone: of the ranks, and of its kernel.

The ranks live until the look is over, which takes 1.5 s at most; where only the node is asked, it takes milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from slurm_resilience.runtime import kernel
from slurm_resilience.runtime.last_look import LastLook
from slurm_resilience.runtime.local_ranks import LocalRanks
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import Kill, Looked, Message


class Witness:
    """Holds a kill back until it has looked."""

    def __init__(self, loop: Loop, run_dir: Path, tell: Callable[[Message], None]) -> None:
        self._loop, self._run_dir, self._tell = loop, run_dir, tell
        self._kill: Kill | None = None
        self._look: LastLook | None = None
        self._since = 0.0
        self._began = 0.0

    @property
    def looking(self) -> bool:
        return self._kill is not None

    def begin(self, kill: Kill, ranks: LocalRanks) -> None:
        """Look at what this kill asks for; :meth:`tick` says when the ranks may be killed."""
        self._kill, self._since, self._began = kill, ranks.began, time.monotonic()
        if kill.look == "ranks":
            recorded = self._run_dir / "incidents" / f"{ranks.attempt:04d}"
            self._look = LastLook(ranks.alive(), self._loop, recorded=recorded)

    def tick(self, now: float) -> Kill | None:
        """The kill that may go on now, after what was seen was told."""
        kill = self._kill
        if kill is None or (self._look is not None and not self._look.tick(now)):
            return None
        ranks = self._look.result() if self._look is not None else {}
        lines = kernel.messages(self._since)
        self._tell(Looked(kill.attempt, ranks, lines, round(now - self._began, 3)))
        self._kill = self._look = None
        return kill

    def forget(self) -> None:
        """The ranks are killed for another reason, at once."""
        self._kill = self._look = None
