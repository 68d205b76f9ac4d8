"""Throwing checkpoints away, and cleaning up after saves that never ended: the name goes first, the data when it can.

A pruned directory is renamed onto the bench before any of its files is touched, so that no reader meets half of it.
What cannot be removed there yet (a file that NFS still holds open) is harmless and tried again later.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from slurm_resilience._clock import Clock
from slurm_resilience.checkpoint import lease, names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.retention import Retention, is_sound, kept
from slurm_resilience.errors import CheckpointError

log = logging.getLogger(__name__)

_Look = tuple[int, int, int]


class Sweeper:
    """Empties ``.gone`` and old ``.writing-…`` directories of one root; never removes what still changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, _Look] = {}
        self._thread: threading.Thread | None = None

    def sweep(self, *, attempt: int, in_use: frozenset[str] = frozenset(), wait: bool = False) -> None:
        """Remove what is gone.  An unfinished save goes when it is of an older attempt, or not in use by us, and has not
        changed between two sweeps.  Data is removed by a thread, unless ``wait``."""
        doomed = [path for path in _children(self._root / names.GONE) if self._still(path)]
        for folder in _children(self._root):
            writer = names.parse_writing(folder.name)
            if writer is None or writer > attempt:
                continue
            doomed += [path for path in _children(folder) if path.name not in in_use and self._still(path)]
        if self._thread is not None and self._thread.is_alive():
            if not wait:
                return
            self._thread.join()
        self._thread = threading.Thread(target=_remove, args=(doomed,), name="checkpoint-sweeper", daemon=True)
        self._thread.start()
        if wait:
            self._thread.join()

    def dispose(self, path: Path) -> None:
        """Say that ``path`` in ``.gone`` has no writer, so that the next sweep may remove it at once."""
        self._seen[path.name] = _look(path)

    def _still(self, path: Path) -> bool:
        look = _look(path)
        before, self._seen[path.name] = self._seen.get(path.name), look
        return before == look


def _children(folder: Path) -> list[Path]:
    try:
        return [Path(found.path) for found in os.scandir(folder) if found.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _look(path: Path) -> _Look:
    """Number of files, their bytes and their latest change: equal looks mean that nobody writes."""
    files = bytes_ = changed = 0
    if os.path.islink(path):  # whatever it points at is not ours to count, and may be the whole file system
        return files, bytes_, changed
    for parent, _, inner in os.walk(path):
        for name in inner:
            try:
                info = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            files, bytes_, changed = files + 1, bytes_ + info.st_size, max(changed, info.st_mtime_ns)
    return files, bytes_, changed


def _remove(paths: list[Path]) -> None:
    for path in paths:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s cannot be removed yet (%s); it will be tried again", path, error)


def victims(
    entries: list[Entry], policy: Retention, *, attempt: int, reading: set[str], bad: Collection[str] = ()
) -> list[Entry]:
    """The entries that go under ``policy``, oldest first.  Raises :class:`CheckpointError` rather than leave no sound one."""
    why = kept(entries, policy, attempt=attempt, being_read=reading, bad=bad)
    going = [entry for entry in sorted(entries, key=lambda entry: entry.order) if entry.name not in why]
    sound = {entry.name for entry in entries if is_sound(entry, bad)}
    if sound and not sound & why.keys():
        raise CheckpointError("Retention would remove every usable checkpoint; nothing was removed", evidence=repr(policy))
    return going


def is_read_after_all(root: Path, name: str, buried: Path, *, owner: int, clock: Clock) -> bool:
    """Whether a reader took a lease while the name went; then the name is given back."""
    if name not in lease.being_read(root, owner=owner, clock=clock):
        return False
    os.rename(buried, root / name)
    return True
