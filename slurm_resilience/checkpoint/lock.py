"""One writer of the index at a time, where the file system allows it; nothing but the index's upkeep depends on it.

``flock`` through filelock where it exists; an existence lock where it does not (ENOSYS), whose holder says who it is and which
is taken over on proof that it cannot go on (its attempt is fenced, its boot or its process is gone), never by age.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from slurm_resilience._clock import boot_id
from slurm_resilience.checkpoint import names

log = logging.getLogger(__name__)

WAIT_S = 2.0
IMPATIENT_S = 0.05
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


class RootLock:
    """The lock of a checkpoint root.  Entering always succeeds: without exclusion the fence still protects.

    A holder that does not let go (a frozen leftover of an older attempt) costs one wait, not one for each use.
    """

    def __init__(self, root: str | os.PathLike[str], *, attempt: int | None = None, wait_s: float = WAIT_S) -> None:
        self._path = Path(root) / names.LOCK
        self._existence = ExistenceLock(Path(root) / names.EXISTENCE_LOCK, attempt=attempt)
        self._wait_s = self._patience_s = wait_s
        self._no_flock = ""

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Whether the lock is held; False after the wait, or where nothing can be locked (both are logged once)."""
        release = self._acquire()
        try:
            yield release is not None
        finally:
            if release is not None:
                release()

    def _acquire(self) -> Callable[[], None] | None:
        try:
            release = self._flock() if not self._no_flock else self._existence.acquire(self._patience_s)
        except Timeout:
            if self._patience_s == self._wait_s:
                log.warning("%s is held by somebody for more than %.1f s; going on without it", self._path, self._wait_s)
            self._patience_s = min(IMPATIENT_S, self._wait_s)
            return None
        except OSError as error:
            log.warning("%s cannot be locked (%s); the attempt number fences, the index may need a rebuild", self._path, error)
            return None
        self._patience_s = self._wait_s
        return release

    def _flock(self) -> Callable[[], None]:
        try:
            lock = _file_lock(self._path, self._patience_s)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and (isinstance(error, Timeout) or error.errno not in _NO_FLOCK):
                raise
            self._no_flock = str(error)
            log.warning("%s: this file system has no flock (%s); an existence lock is used", self._path.parent, error)
            return self._existence.acquire(self._patience_s)
        return lock.release


def _file_lock(path: Path, timeout_s: float) -> FileLock:
    try:
        return FileLock(path, timeout=timeout_s, mode=0o644, fallback_to_soft=False)
    except TypeError:  # before filelock learnt to replace flock by a lock of its own, which is told to be dead by its age
        return FileLock(path, timeout=timeout_s, mode=0o644)


class ExistenceLock:
    """A lock that is held by a file's existence; the file says who holds it."""

    def __init__(self, path: Path, *, attempt: int | None) -> None:
        self._path = path
        self._attempt = attempt

    def acquire(self, timeout_s: float) -> Callable[[], None]:
        """Hold it; returns what lets it go.  Raises :class:`filelock.Timeout`."""
        deadline = time.monotonic() + timeout_s
        mine = {
            "attempt": self._attempt,
            "node": socket.gethostname(),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "started": process_started(os.getpid()),
        }
        while not self._create(mine):
            holder = self._holder()
            if holder is not None and is_dead(holder, attempt=self._attempt):
                self._take_away(holder)
                continue
            if time.monotonic() >= deadline:
                raise Timeout(str(self._path))
            time.sleep(0.01)
        return lambda: self._path.unlink(missing_ok=True)

    def _create(self, about: dict[str, Any]) -> bool:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(fd, json.dumps(about).encode())
        finally:
            os.close(fd)
        return True

    def _holder(self) -> dict[str, Any] | None:
        """Who holds it; None when it is gone, or not (yet) readable: that proves nothing."""
        try:
            value = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def _take_away(self, holder: dict[str, Any]) -> None:
        """Remove a dead holder's file.  It is renamed first, and given back if it turns out to be somebody else's."""
        aside = self._path.with_name(f"{self._path.name}.{os.urandom(4).hex()}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        try:
            if json.loads(aside.read_bytes()) == holder:
                log.warning("the lock %s of a dead holder (%s) is taken over", self._path, holder)
                aside.unlink()
            else:
                os.link(aside, self._path)
                aside.unlink()
        except (OSError, ValueError) as error:
            log.warning("the lock %s changed hands in the middle of a take-over: %s", self._path, error)


def is_dead(holder: dict[str, Any], *, attempt: int | None) -> bool:
    """Whether there is proof that ``holder`` cannot go on.  Not knowing is no proof."""
    theirs = holder.get("attempt")
    if attempt is not None and isinstance(theirs, int) and theirs < attempt:
        return True
    if holder.get("node") != socket.gethostname() or not boot_id() or not holder.get("boot_id"):
        return False
    if holder["boot_id"] != boot_id():
        return True
    pid = holder.get("pid")
    return isinstance(pid, int) and process_started(pid) != holder.get("started")


def process_started(pid: int) -> int | None:
    """When a process began, in clock ticks after the boot; None when there is none.  Source: proc(5), stat, field 22."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(raw.rpartition(b")")[2].split()[19])
