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
_LONGEST_NAME = 60  # leaves room in the 107 bytes of a socket's address; source: unix(7)


class NodeFolder:
    """Pages and socket of this agent.  Raises :class:`LaunchError` when another user owns the place."""

    def __init__(self, run_id: str, node: str, *, base: Path = SHARED_MEMORY, patience_s: float = 5.0) -> None:
        top = base / f"slurm-resilience-{os.geteuid()}"
        _private(top)
        self.path = top / _short(f"{run_id}-{node}")
        _private(self.path)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._take(patience_s)
        for old in self.path.iterdir():
            if old.name != "lock":
                old.unlink()

    def _take(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _holder(self._lock)
                if holder is not None:
                    send_signal(holder, signal.SIGKILL)
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"An older agent does not let go of {self.path}",
                        evidence=f"it is still locked {patience_s:.0f} s after process {holder and holder.pid} was killed",
                        remedy="look for a process in state D on this node; it waits for a device or a file system",
                    ) from None
                time.sleep(0.01)
        me = myself()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{me.pid} {me.started}\n".encode(), 0)

    @property
    def facts(self) -> Path:
        """The socket to which ranks send facts."""
        return self.path / "facts"

    def page(self, attempt: int, rank: int) -> Path:
        """The progress page of a rank in an attempt."""
        return self.path / f"page-{attempt}-{rank}"

    def imports(self, attempt: int) -> Path:
        """Where the node's first rank writes down what it imports."""
        return self.path / f"imports-{attempt}"

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        os.close(self._lock)


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
