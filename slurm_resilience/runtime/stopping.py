"""Killing an attempt, and proving that nothing of it is alive.

Everything under the agent belongs to the attempt, also what changed its group or session or lost its parent, because the
agent is the subreaper of its tree; only launchers, helpers and the next attempt's store are spared.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from slurm_resilience.runtime.processes import Process, descendants, send_signal

_LOOK_EVERY_S = 0.01
_SAY_AFTER_S = 5.0


class Stop:
    """One stop, done in ticks.  With ``grace_s`` over 0 the ``leaders`` get TERM first, and all get KILL after that time.

    ``killed`` counts the processes that got KILL, ``left`` those that were alive at the last look.
    """

    def __init__(self, attempt: int, why: str, *, grace_s: float = 0.0, leaders: Iterable[Process] = ()) -> None:
        self.attempt = attempt
        self.why = why
        self.began = time.monotonic()
        self.killed: set[int] = set()
        self.left: list[Process] = []
        self._kill_at = self.began + grace_s
        self._look_at = self.began
        self._say_at = self.began + grace_s + _SAY_AFTER_S
        if grace_s > 0:
            for leader in leaders:
                send_signal(leader, signal.SIGTERM)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.began

    def hurry(self, attempt: int, why: str, grace_s: float) -> None:
        """Another stop was asked for meanwhile: the newer attempt, the newer reason and the shorter grace count."""
        self.attempt = max(self.attempt, attempt)
        self.why = why
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def next_look(self) -> float:
        """When to call :meth:`tick` again (monotonic)."""
        return self._look_at

    def tick(self, spare: Iterable[int], spare_trees: Iterable[int] = ()) -> bool:
        """Look, kill what lives when it is time to; True on the proof that nothing does."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self.left = descendants(os.getpid(), spare=spare, spare_trees=spare_trees)
        if now >= self._kill_at:
            for process in self.left:
                if send_signal(process, signal.SIGKILL):
                    self.killed.add(process.pid)
        self._look_at = now + _LOOK_EVERY_S
        return not self.left

    def complaint(self) -> str:
        """A sentence when something will not die (state D: it waits for a device or a file system), else ""; once per 5 s."""
        now = time.monotonic()
        if not self.left or now < self._say_at:
            return ""
        self._say_at = now + _SAY_AFTER_S
        names = ", ".join(f"{process.pid} (state {process.state})" for process in self.left[:8])
        return f"attempt {self.attempt} cannot be stopped: after {self.seconds:.0f} s still alive: {names}"
