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

WAIT_S = 2.0
IMPATIENT_S = 0.05


class RootLock:
    """The lock of a checkpoint root.  Entering always succeeds: without exclusion the fence still protects.

    A holder that does not let go (a frozen leftover of an older attempt) costs one wait, not one for each use.
    """

    def __init__(self, root: str | os.PathLike[str], *, wait_s: float = WAIT_S) -> None:
        self._path = Path(root) / names.LOCK
        self._wait_s = self._patience_s = wait_s
        self._useless = ""

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Whether the lock is held; False after ``wait_s``, or where locks do not work (logged once)."""
        lock = FileLock(self._path, timeout=self._patience_s, mode=0o644)
        got = False
        if not self._useless:
            try:
                lock.acquire()
                got = True
                self._patience_s = self._wait_s
            except Timeout:
                if self._patience_s == self._wait_s:
                    log.warning("%s is held by somebody for more than %.0f s; going on without it", self._path, self._wait_s)
                self._patience_s = min(IMPATIENT_S, self._wait_s)
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
