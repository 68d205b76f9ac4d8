"""Starting ranks, and the store, without a warm launcher: a new interpreter each, or the user's program as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from slurm_resilience.runtime.launcher_link import LAUNCHER
from slurm_resilience.runtime.local_ranks import LocalRank, LocalRanks
from slurm_resilience.runtime.processes import spawn
from slurm_resilience.runtime.store_host import listen


def start_cold(rank: LocalRank, ranks: LocalRanks, wrap: Sequence[str]) -> int:
    """Start one rank by exec and return its process number.  Raises OSError when it cannot even be forked.

    A Python program goes through ``launcher.py rank``, so that it runs just as it would have when forked.  Anything else is
    started as it is, with Slurm's warnings (TERM, USR1, USR2) ignored until it, or what it starts, installs handlers.
    """
    launch, command = ranks.launch, ranks.command
    if command is None:
        return spawn([*wrap, *launch.argv], env=rank.environment, log=rank.log, header=launch.header, cwd=launch.cwd)
    request = os.memfd_create("resilience-rank")
    try:
        os.write(request, json.dumps(rank.request).encode())
        os.lseek(request, 0, os.SEEK_SET)
        return spawn(
            [*wrap, command.interpreter, *command.flags, str(LAUNCHER), "rank"],
            env=rank.environment, log=rank.log, header=launch.header, cwd=launch.cwd, stdin=request,
        )  # fmt: skip
    finally:
        os.close(request)


class StoreHost:
    """A process that hosts c10d's store, started cold.  Watch it: when it can be read, ask :meth:`is_ready`."""

    def __init__(self, pid: int, attempt: int, port: int, ready: int) -> None:
        self.pid, self.attempt, self.port = pid, attempt, port
        self._ready = ready

    @classmethod
    def start(cls, interpreter: Sequence[str], *, log: Path, attempt: int) -> StoreHost:
        """Listen, and have ``interpreter`` serve there once it has imported torch."""
        ready, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            with listen() as listener:
                fd = listener.fileno()
                pid = spawn(
                    [*interpreter, str(LAUNCHER), "store", str(fd), str(theirs)],
                    env=dict(os.environ),
                    log=log,
                    keep=(fd, theirs),
                )
                port = int(listener.getsockname()[1])
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ready, False)
        return cls(pid, attempt, port, ready)

    def fileno(self) -> int:
        return self._ready

    def is_ready(self) -> bool:
        """Whether it serves; False: it ended before it did."""
        return bool(os.read(self._ready, 1))

    def close(self) -> None:
        """Stop watching it."""
        os.close(self._ready)
