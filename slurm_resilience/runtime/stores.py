"""The hosts of c10d's store on this node: forked from a warm launcher, or started cold, one per attempt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_resilience.runtime.cold import StoreHost
from slurm_resilience.runtime.command import PythonCommand
from slurm_resilience.runtime.launchers import Launchers
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import Message, StoreFailed, StoreReady


class Stores:
    """Starts a store when it is wanted and the launcher has made up its mind, and tells of its port or its end."""

    def __init__(
        self, loop: Loop, command: PythonCommand | None, *, wrap: Sequence[str], log: Path, tell: Callable[[Message], None]
    ) -> None:
        self._loop = loop
        self._interpreter = [*wrap, command.interpreter, *command.flags] if command else [sys.executable]
        self._log = log
        self._tell = tell
        self._wanted: int | None = None
        self._attempts: dict[int, int] = {}  # process number -> attempt
        self._waiting: set[int] = set()  # attempts whose cold host does not listen yet

    def want(self, attempt: int) -> None:
        """Host one for this attempt; a later wish replaces one that was not begun."""
        self._wanted = attempt

    def forget(self, attempt: int) -> None:
        """This attempt and older ones are being stopped."""
        if self._wanted is not None and self._wanted <= attempt:
            self._wanted = None

    def processes(self, after: int) -> set[int]:
        """Hosts of attempts newer than ``after``."""
        return {pid for pid, attempt in self._attempts.items() if attempt > after}

    def advance(self, launchers: Launchers) -> None:
        """Start the wanted one if the launcher is warm, or will not be."""
        if self._wanted is None or launchers.warm is None:
            return
        attempt, self._wanted = self._wanted, None
        link = launchers.current
        if launchers.warm and link is not None:
            link.pending += 1
            link.send(m="store", attempt=attempt)
        else:
            self.start_cold(attempt)

    def forked(self, attempt: int, pid: int, port: int) -> None:
        """The launcher forked one, which listens already."""
        self._attempts[pid] = attempt
        self._tell(StoreReady(attempt, port))

    def start_cold(self, attempt: int) -> None:
        """Start one in an interpreter of its own."""
        try:
            host = StoreHost.start(self._interpreter, log=self._log, attempt=attempt)
        except OSError as error:
            self._tell(StoreFailed(attempt, f"cannot listen or fork: {error}"))
            return
        self._waiting.add(attempt)
        self._attempts[host.pid] = attempt
        self._loop.watch(host, lambda: self._spoke(host))

    def _spoke(self, host: StoreHost) -> None:
        self._loop.forget(host)
        self._waiting.discard(host.attempt)
        if host.is_ready():
            self._tell(StoreReady(host.attempt, host.port))
        else:
            self._tell(StoreFailed(host.attempt, f"the store's host ended before it listened; see {self._log}"))
        host.close()

    def ended(self, pid: int, *, expected: bool) -> None:
        """A process ended; if it was a host, and nobody asked for its end, that is told."""
        attempt = self._attempts.pop(pid, None)
        if attempt is not None and not expected and attempt not in self._waiting:
            self._tell(StoreFailed(attempt, "the store's host died"))
