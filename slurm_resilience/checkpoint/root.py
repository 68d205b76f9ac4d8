"""A checkpoint root that is opened: who owns it, and what is in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_resilience._clock import Clock
from slurm_resilience.checkpoint import filesystem, folders, lease, names
from slurm_resilience.checkpoint.bench import Bench
from slurm_resilience.checkpoint.entry import Entry, State
from slurm_resilience.checkpoint.fence import Fence
from slurm_resilience.checkpoint.index import BY_SCAN, CheckpointIndex
from slurm_resilience.checkpoint.lock import RootLock
from slurm_resilience.checkpoint.manifest import Manifest, read_manifest
from slurm_resilience.checkpoint.ownership import Ownership
from slurm_resilience.checkpoint.trust import Trust
from slurm_resilience.errors import CheckpointError, Fenced

log = logging.getLogger(__name__)


class OpenRoot:
    """One checkpoint root, opened by one attempt (or, with ``attempt`` None, by a person or a reader)."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        attempt: int | None,
        about: dict[str, Any],
        clock: Clock,
        run_id: str = "",
    ) -> None:
        self.root = Path(root)
        self.run_id = run_id
        self.ownership = Ownership(self.root)
        self.attempt = attempt
        self.about = about
        self.trust = Trust()
        self.fence_token = Fence(self.root)
        self._bench = Bench(self.root, attempt)
        self.index = CheckpointIndex(self.root, self._bench)
        self._lock = RootLock(self.root, attempt=attempt)
        self._clock = clock

    def newest_attempt(self) -> int:
        """The newest attempt that has opened this root for writing, -1 before the first."""
        return self.fence_token.current()

    def fence(self) -> None:
        """Make this attempt the owner: older ones can commit, mark and prune nothing from here on.  One rank calls it.

        Also brings the index up to date with the directories.  Raises :class:`Fenced`, :class:`RootOfAnotherRun` when another
        run has opened it, or OSError; the root is then as it was.
        """
        attempt = self._attempt()
        folders.ensure(self.root)
        self.ownership.require(self.run_id)
        self.fence_token.check(attempt)
        self.ownership.claim(self.run_id)
        log.info("checkpoints are in %s, on %s", self.root, filesystem.of(self.root))
        about = {**self.about, "run_id": self.run_id, "pid": os.getpid(), "at": self._clock.time()}
        for path in self.fence_token.raise_to(attempt, about):
            log.info("unfinished saves of an older attempt were moved to %s", path)
        self._bench.set_up()
        with self._lock.held():
            known = self.index.lookup()
            newest: list[Entry] = []
            for entry in self.index.walk():
                if entry.usable:
                    newest = [entry]
                    break
                if entry.by == BY_SCAN:
                    log.error("%s is passed over: %s", self.root / entry.name, entry.reason)
            if known is None or known[:1] != newest or self.index.next_path.exists():
                if newest:
                    log.warning("the index of %s was behind its directories and is rebuilt", self.root)
                self.index.rebuild()
            self.index.append("fence", self._clock.time(), attempt=attempt, run_id=self.run_id, **self.about)

    def latest(self) -> Entry | None:
        """The entry to resume from, None when there is none at all.  O(1): no lock, no listing, unless the index is broken."""
        return next(self.candidates(), None)

    def candidates(self) -> Iterator[Entry]:
        """What may be resumed from, best first: newest first, but those that an attempt began to load and never
        verified come last.  Asks the directories only after the head's entries are used up."""
        head = self.index.lookup()
        if head is None:
            head = self._repair()
        seen = set()
        for known in head:
            entry = self.index.current(known)
            if entry is not None and not entry.attempts:
                seen.add(entry.name)
                yield entry
        rest = [entry for entry in self.index.walk() if entry.usable and entry.name not in seen]
        yield from (entry for entry in rest if not entry.attempts)
        yield from (entry for entry in rest if entry.attempts)

    def passed_over(self, chosen: Entry | None) -> Iterator[tuple[Entry, str]]:
        """Newer entries that were not chosen though nobody has quarantined them, and why.  Reads each one's manifest."""
        for entry in self.index.walk():
            if chosen is not None and entry.order <= chosen.order:
                return
            if not entry.readable:
                yield entry, entry.reason
            elif entry.usable and entry.attempts:
                yield entry, f"{'an attempt' if entry.attempts == 1 else f'{entry.attempts} attempts'} ended while loading it"

    def path(self, entry: Entry) -> Path:
        return self.root / entry.name

    def manifest(self, entry: Entry) -> Manifest:
        """The manifest of an entry, checked against the index.  Raises :class:`CorruptCheckpoint`."""
        return read_manifest(self.path(entry), expect_sha256=entry.manifest_sha256)

    def entries(self) -> list[Entry]:
        """All entries, quarantined ones too, newest first, as the directories tell them.  O(number of checkpoints)."""
        return list(self.index.walk())

    def unfinished(self) -> list[Entry]:
        """The saves that are being written, or were when their process ended: in state ``writing``, of unknown size."""
        found = []
        for folder in sorted(self.root.glob(".writing-a*")):
            for path in folder.glob("step-*.tmp"):
                parsed = names.parse(path.name.removesuffix(".tmp"))
                if parsed is not None and path.is_dir():
                    name = path.name.removesuffix(".tmp")
                    found.append(Entry(name, parsed.step, parsed.attempt, 0, 0, "", state=State.WRITING))
        return sorted(found, key=lambda entry: entry.order, reverse=True)

    def rebuild(self) -> list[Entry]:
        """Make the index anew from the manifests."""
        with self._lock.held():
            return self.index.rebuild()

    def check_owner(self) -> None:
        """Raise :class:`Fenced` when a newer attempt owns the root; that explains any other failure."""
        if self.attempt is not None:
            self.fence_token.check(self.attempt)

    def reading(self, entry: Entry) -> contextlib.AbstractContextManager[None]:
        """While this is held, nobody prunes ``entry``."""
        return lease.reading(self.root, entry.name, attempt=self.attempt, clock=self._clock)

    def _rank_of_owner(self) -> int:
        return self.fence_token.current() if self.attempt is None else self.attempt

    def _attempt(self) -> int:
        if self.attempt is None:
            raise CheckpointError("This checkpoint root was opened without an attempt number, so nothing can be saved into it")
        return self.attempt

    def _repair(self) -> list[Entry]:
        """The index cannot be believed: ask the directories, and mend it if we may."""
        if not self.root.is_dir():
            return []
        try:
            self.check_owner()
            with self._lock.held():
                return self.index.rebuild()
        except (OSError, Fenced) as error:
            log.warning("the index of %s could not be mended (%s); its directories were read instead", self.root, error)
            return self.index.newest_usable()
