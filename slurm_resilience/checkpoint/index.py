"""The index of a checkpoint root: the newest few usable entries in one file of at most 4 KiB, and a history beside it.

A lookup reads one small file and looks at one directory, whatever the number of checkpoints; it takes no lock and lists
nothing.  The index is a cache: the directories, their manifests and marks are the truth, from which it is rebuilt.

A commit writes ``head.next.json`` durably *before* the checkpoint's directory gets its name, and renames it to
``head.json`` afterwards.  So running out of quota shows before anything is published, and a crash in between leaves
either a next head whose checkpoint is not there (it is ignored) or one whose checkpoint is (it counts).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint import marks, names, sealed
from slurm_resilience.checkpoint.bench import Bench
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.entry import Entry, State
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.manifest import read_manifest
from slurm_resilience.errors import CheckpointError, FormatError, ResilienceError

__all__ = ["CheckpointIndex", "Entry", "State"]

VERSION = 1
HEAD_BYTES = 4096
HEAD_ENTRIES = 8
BY_SCAN = "scan"

_Look = tuple[int, int, int]

log = logging.getLogger(__name__)


class CheckpointIndex:
    """Head and history of one root.  Writing expects the caller to hold the root's lock; reading expects nothing."""

    def __init__(self, root: str | os.PathLike[str], bench: Bench | None = None) -> None:
        self.root = Path(root)
        self._bench = bench or Bench(self.root)
        self.head_path = self.root / names.HEAD
        self.next_path = self.root / names.NEXT_HEAD
        self._committed: dict[str, tuple[_Look, Entry]] = {}
        self._digests: dict[str, tuple[_Look, str]] = {}

    def lookup(self) -> list[Entry] | None:
        """The newest few usable entries, newest first; None when there is no head, or none that can be believed.

        Constant time: one small file, and one look at the newest entry's manifest.
        """
        following = self._read(self.next_path)
        head = self._read(self.head_path)
        if following:
            if not self.present(following[0]):
                following = following[1:]  # its checkpoint never got its name; the rest is what the head said before
            if following and self.present(following[0]) and (not head or following[0].order >= head[0].order):
                return following
        if head and not self.present(head[0]):
            log.warning("checkpoint index %s names %s, which is not there: not believed", self.head_path, head[0].name)
            return None
        return head

    def publish(self, entries: Iterable[Entry]) -> None:
        """Replace the head by the newest usable of ``entries``."""
        self._bench.put(self.head_path, _compose(entries))

    def announce(self, entries: Iterable[Entry]) -> None:
        """Write the head that counts once its newest entry's directory has its name.

        Its data is durable, its name becomes so together with the directory's: by the fsync of the root that follows.
        """
        self._bench.put(self.next_path, _compose(entries), durable=False)

    def confirm(self, entries: list[Entry]) -> None:
        """Make the announced head the head; needs no space.  ``entries`` are written anew if somebody took it away."""
        try:
            os.replace(self.next_path, self.head_path)
        except (FileNotFoundError, IsADirectoryError):
            self.publish(entries)
            return
        now = self._read(self.head_path)
        if not now or now[0].name != entries[0].name:
            self.publish(entries)

    def withdraw(self) -> None:
        """Forget an announced head."""
        self._bench.remove(self.next_path)

    def append(self, op: str, at: float, **fields: Any) -> None:
        """Add one line to the history, if there is room.  Nothing depends on it, so it is not fsynced, and never in the way."""
        line = json.dumps({"v": VERSION, "op": op, "at": round(at, 3), **fields}, default=str) + "\n"
        try:
            fd = os.open(self.root / names.HISTORY, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("%s was not written: %s", self.root / names.HISTORY, error)

    def walk(self) -> Iterator[Entry]:
        """The entries as the directories tell them, newest first: the slow truth, one manifest at a time.

        A directory whose manifest cannot be believed becomes a quarantined entry with that reason, found by ``BY_SCAN``.
        """
        try:
            listed = os.listdir(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return
        for _, _, name in sorted(((p.attempt, p.step, name) for name in listed if (p := names.parse(name))), reverse=True):
            entry = self.entry(name)
            if entry is not None:
                yield entry

    def newest_usable(self, *, without: Collection[str] = ()) -> list[Entry]:
        """As many of the newest usable entries as a head may hold, from the directories."""
        usable = (entry for entry in self.walk() if entry.usable and entry.name not in without)
        return list(itertools.islice(usable, HEAD_ENTRIES))

    def entry(self, name: str) -> Entry | None:
        """One directory's entry with its marks; None when the directory is gone."""
        directory = self.root / name
        parsed = names.parse(name)
        if parsed is None:
            return None
        try:
            return marks.apply(self._base(directory), directory)
        except (CorruptCheckpoint, FormatError, OSError) as error:
            if not os.path.isdir(directory):
                return None
            broken = error.what if isinstance(error, ResilienceError) else str(error)
        bare = marks.apply(Entry(name, parsed.step, parsed.attempt, 0, 0, ""), directory)
        if bare.state is State.QUARANTINED:
            return bare.with_marks(reason=f"{bare.reason}; {broken}")
        return bare.with_marks(state=State.QUARANTINED, by=BY_SCAN, reason=broken)

    def _base(self, directory: Path) -> Entry:
        """The entry as it was committed.  A manifest never changes, so each is parsed once, until its file is another."""
        try:
            info = os.stat(directory / names.MANIFEST)
        except FileNotFoundError:
            return read_manifest(directory).entry
        look = _look(info)
        known = self._committed.get(directory.name)
        if known is None or known[0] != look:
            known = self._committed[directory.name] = look, read_manifest(directory).entry
        return known[1]

    def rebuild(self) -> list[Entry]:
        """Make the head anew from the directories; returns the entries that went into it, newest first."""
        usable = self.newest_usable()
        self.publish(usable)
        self.withdraw()
        return usable

    def _read(self, path: Path) -> list[Entry] | None:
        try:
            body = sealed.read(path)
        except (sealed.Broken, OSError) as error:
            log.warning("checkpoint index %s cannot be believed: %s", path, error)
            return None
        if body is None:
            return None
        version = body.get("v", 0) if isinstance(body, dict) else None
        if not isinstance(version, int) or version > VERSION:
            log.warning("checkpoint index %s has version %.40s, we know up to %s", path, version, VERSION)
            return None
        try:
            return [Entry.from_json(value) for value in body["entries"]]
        except (KeyError, TypeError, ValueError) as error:
            log.warning("checkpoint index %s cannot be believed: %s", path, error)
            return None

    def current(self, entry: Entry) -> Entry | None:
        """The head's entry with the marks that its directory has now; None when it is gone, its manifest is not the one that
        was committed, or it must not be used.

        One manifest and its marks are read, whatever the number of checkpoints: what was quarantined, torn or emptied a
        moment ago is not resumed from because the head was not told.
        """
        if not self._unchanged(entry):
            return None
        now = marks.apply(entry, self.root / entry.name)
        return now if now.usable else None

    def present(self, entry: Entry) -> bool:
        """Whether the entry's directory is there.  One look."""
        return os.path.exists(self.root / entry.name / names.MANIFEST)

    def _unchanged(self, entry: Entry) -> bool:
        """Whether its manifest is, byte for byte, the one that was committed.  Read again only when its file is another."""
        path = self.root / entry.name / names.MANIFEST
        try:
            look = _look(os.stat(path))
            if self._digests.get(entry.name, (None, ""))[0] != look:
                self._digests[entry.name] = look, sha256(path.read_bytes())
        except OSError:
            return False
        return self._digests[entry.name][1] == entry.manifest_sha256


def _look(info: os.stat_result) -> _Look:
    """Equal looks mean that the file was not written between them."""
    return info.st_ino, info.st_mtime_ns, info.st_size


def _compose(entries: Iterable[Entry]) -> bytes:
    """The head's bytes: the newest usable entries, as many as fit."""
    newest = sorted((entry for entry in entries if entry.usable), key=lambda entry: entry.order, reverse=True)
    for count in range(min(len(newest), HEAD_ENTRIES), -1, -1):
        raw = sealed.seal({"v": VERSION, "entries": [entry.to_json() for entry in newest[:count]]})
        if len(raw) <= HEAD_BYTES and (count or not newest):
            return raw
    raise CheckpointError(
        f"Entry {newest[0].name} does not fit into the index",
        evidence=f"it alone needs more than {HEAD_BYTES} bytes",
        remedy="record fewer metrics with a checkpoint; larger things belong into 'extra'",
    )
