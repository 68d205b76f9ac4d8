"""How a root is changed: through a directory of the attempt's own, which a newer attempt takes away.

Every file is written on the bench and renamed to where it counts; every name that goes is renamed onto the bench.  Raising
the fence moves the older attempts' benches (fence.py), so a leftover that was frozen after its last check, at whatever call,
finds that its next rename has no source or no target.  This needs no lock, only a file system that keeps a rename whole.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import fsync_dir
from slurm_resilience.checkpoint import folders, names
from slurm_resilience.checkpoint.fence import Fence
from slurm_resilience.errors import CheckpointError

log = logging.getLogger(__name__)


class Bench:
    """The bench of one attempt; a person (``attempt`` None) works in the root itself, and is never fenced."""

    def __init__(self, root: Path, attempt: int | None = None) -> None:
        self._root = root
        self._attempt = attempt
        self._folder = root if attempt is None else root / names.writing_dir(attempt)

    def set_up(self) -> None:
        """Make it.  Only when the root is opened: whoever made it again after it was taken away would not be fenced."""
        folders.ensure(self._folder)

    def make(self, name: str) -> Path:
        """A fresh directory on the bench."""
        path = self._folder / name
        try:
            path.mkdir(mode=0o755)
        except FileNotFoundError as error:
            self._explain(error)
            raise
        return path

    def put(self, path: Path, data: bytes, *, durable: bool = True) -> None:
        """Replace ``path`` by ``data``, all of it or nothing.  Its bytes are durable in any case, its name if ``durable``."""
        tmp = self._folder / f".{path.name}.{os.urandom(4).hex()}.tmp"
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.replace(tmp, path)
            except IsADirectoryError:
                self._aside(path)
                os.replace(tmp, path)
        except BaseException as error:
            tmp.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                self._explain(error)
            raise
        if durable:
            fsync_dir(path.parent)

    def put_json(self, path: Path, value: Any) -> None:
        """:meth:`put` of one JSON document."""
        self.put(path, (json.dumps(value, allow_nan=False, sort_keys=True) + "\n").encode())

    def remove(self, path: Path) -> None:
        """Take a file away; nothing happens where there is none."""
        if not os.path.lexists(path):
            return
        if path.is_dir() and not path.is_symlink():
            self._aside(path)
            return
        tmp = self._folder / f".{path.name}.{os.urandom(4).hex()}.tmp"
        try:
            os.rename(path, tmp)
        except FileNotFoundError as error:
            if os.path.lexists(path):
                self._explain(error)
                raise
            return
        tmp.unlink(missing_ok=True)

    def _aside(self, path: Path) -> None:
        """A directory where a file of ours belongs is nothing that we made: it is moved out of the way, and kept."""
        kept = self._root / f".aside-{path.name}-{os.urandom(4).hex()}"
        os.rename(path, kept)
        log.warning("%s was a directory; it was moved to %s, since a file belongs there", path, kept)

    def take(self, path: Path) -> Path:
        """Take a directory's name away in one step; returns where it is now.  Raises FileNotFoundError when it is not there."""
        folder = self._folder
        if self._attempt is None:
            folder = self._root / names.GONE
            folders.ensure(folder)
        target = folder / f"gone-{path.name}-{os.urandom(4).hex()}"
        try:
            os.rename(path, target)
        except FileNotFoundError as error:
            if path.exists():
                self._explain(error)
            raise
        fsync_dir(path.parent)  # or a power loss gives the name back when its data is gone
        fsync_dir(folder)
        return target

    def _explain(self, error: FileNotFoundError) -> None:
        """Why the bench is not there: it was taken away, or never set up."""
        if self._attempt is None:
            return
        Fence(self._root).check(self._attempt)
        if not self._folder.is_dir():
            raise CheckpointError(
                f"Attempt {self._attempt} has not opened {self._root} for writing",
                evidence=f"{self._folder} does not exist",
                remedy="call CheckpointStore.fence() on one rank before anything is saved or marked",
            ) from error
