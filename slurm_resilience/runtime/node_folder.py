"""The folder of one run on one node: progress pages and the fact socket, in memory, owned by one agent at a time.

``/dev/shm/slurm-resilience-UID/RUN-NODE/``, readable by its user alone.  The agent holds a lock on it; a newer agent ends
the one that holds it, so that two never fight over the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

from slurm_resilience.errors import LaunchError
from slurm_resilience.runtime.processes import Process, look, myself, send_signal

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory, not a place for temporary files; ownership is checked below
_LOCK = "lock"
_STALE_S = 3600.0  # folders of agents that were killed together with their guardian
_LONGEST_NAME = 60  # leaves room in the 107 bytes of a socket's address; source: unix(7)


class NodeFolder:
    """Pages and socket of this agent.  Raises :class:`LaunchError` when another user owns the place."""

    def __init__(self, run_id: str, node: str, *, base: Path = SHARED_MEMORY, patience_s: float = 5.0) -> None:
        self.path = place(run_id, node, base=base)
        _private(self.path.parent)
        self._lock = self._take(time.monotonic() + patience_s)
        me = myself()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{me.pid} {me.started}\n".encode(), 0)
        for old in self.path.iterdir():
            if old.name != _LOCK:
                old.unlink()
        for other in self.path.parent.iterdir():
            if other != self.path and time.time() - other.lstat().st_mtime > _STALE_S:
                remove_if_free(other)

    def _take(self, deadline: float) -> int:
        """The locked lock, of a folder that is still there once it is ours."""
        while True:
            _private(self.path)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(lock, self.path / _LOCK):
                    return lock
            except BlockingIOError:
                holder = _holder(lock)
                if holder is not None:
                    send_signal(holder, signal.SIGKILL)
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise LaunchError(
                        f"An older agent does not let go of {self.path}",
                        evidence=f"it is still locked long after process {holder and holder.pid} was killed",
                        remedy="look for a process in state D on this node; it waits for a device or a file system",
                    ) from None
                time.sleep(0.01)
            os.close(lock)

    @property
    def facts(self) -> Path:
        """The socket to which ranks send facts."""
        return self.path / "facts"

    def page(self, attempt: int, rank: int) -> Path:
        """The progress page of a rank in an attempt."""
        return self.path / f"page-{attempt}-{rank}"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Where a rank writes its Python stacks when it is asked to."""
        return self.path / f"stacks-{attempt}-{rank}"

    def imports(self, attempt: int) -> Path:
        """Where the node's first rank writes down what it imports."""
        return self.path / f"imports-{attempt}"

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        os.close(self._lock)


def place(run_id: str, node: str, *, base: Path = SHARED_MEMORY) -> Path:
    """Where the folder of this run on this node is, or would be."""
    return base / f"slurm-resilience-{os.geteuid()}" / _short(f"{run_id}-{node}")


def remove_if_free(path: Path) -> bool:
    """Remove a node folder that no agent holds; False when one does, or there is none."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(lock, path / _LOCK):
            return False
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(lock: int) -> Process | None:
    """The process that wrote itself into the lock file, if it still is that process."""
    words = os.pread(lock, 64, 0).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    found = look(int(words[0]))
    return found if found is not None and found.started == int(words[1]) else None


def _private(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    stat = path.lstat()
    if stat.st_uid != os.geteuid() or not path.is_dir() or path.is_symlink() or stat.st_mode & 0o077:
        raise LaunchError(
            f"{path} cannot be trusted",
            evidence=f"it belongs to user {stat.st_uid}, mode {stat.st_mode:o}; it must be ours ({os.geteuid()}), mode 700",
            remedy="ask the node's admin to remove it",
        )


def _short(name: str) -> str:
    clean = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
    if clean == name and len(name) <= _LONGEST_NAME:
        return name
    return f"{clean[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
