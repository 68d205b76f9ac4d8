"""One writer of the index at a time, where the file system allows it; nothing but upkeep depends on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from slurm_resilience.checkpoint import names

log = logging.getLogger(__name__)

WAIT_S = 10.0


class RootLock:
    """The lock of a checkpoint root.  Entering always succeeds: without exclusion the fence still protects."""

    def __init__(self, root: str | os.PathLike[str], *, wait_s: float = WAIT_S) -> None:
        self._path = Path(root) / names.LOCK
        self._wait_s = wait_s
        self._useless = ""

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Whether the lock is held; False after ``wait_s``, or where locks do not work (logged once)."""
        lock = FileLock(self._path, timeout=self._wait_s, mode=0o644)
        got = False
        if not self._useless:
            try:
                lock.acquire()
                got = True
            except Timeout:
                log.warning("%s is held by somebody else for more than %.0f s; going on without it", self._path, self._wait_s)
            except (OSError, NotImplementedError) as error:
                self._useless = str(error)
                log.warning(
                    "%s cannot be locked (%s); the attempt number fences, the index may need a rebuild", self._path, error
                )
        try:
            yield got
        finally:
            if got:
                lock.release()
