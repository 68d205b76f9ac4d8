"""A checkpoint root as its users see it: begin and commit a save, find the latest, mark what was found out, throw away.

Everything here works on names, sizes and JSON; tensors are dcp.py's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience import __version__
from slurm_resilience._atomic import fsync_dir, write_atomic
from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.checkpoint import filesystem, folders, lease, marks, names, space
from slurm_resilience.checkpoint.bench import Bench
from slurm_resilience.checkpoint.entry import Entry, State
from slurm_resilience.checkpoint.fence import Fence
from slurm_resilience.checkpoint.index import BY_SCAN, CheckpointIndex
from slurm_resilience.checkpoint.lock import RootLock
from slurm_resilience.checkpoint.manifest import Item, Manifest, check_declared, read_manifest
from slurm_resilience.checkpoint.prune import Sweeper, is_read_after_all, victims
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.trust import Trust
from slurm_resilience.errors import CheckpointError, Fenced

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """A save that has begun: ``path`` is a fresh directory that nobody takes for a checkpoint."""

    name: str
    step: int
    path: Path
    began: float = field(default_factory=time.monotonic)


class CheckpointStore:
    """One checkpoint root, opened by one attempt (or, with ``attempt`` None, by a person or a reader)."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        attempt: int | None,
        about: dict[str, Any],
        retention: Retention | None,
        clock: Clock,
    ) -> None:
        self.root = Path(root)
        self.attempt = attempt
        self.about = about
        self.retention = retention
        self.trust = Trust()
        self.fence_token = Fence(self.root)
        self._bench = Bench(self.root, attempt)
        self.index = CheckpointIndex(self.root, self._bench)
        self._lock = RootLock(self.root, attempt=attempt)
        self._clock = clock
        self._sweeper = Sweeper(self.root)
        self._drafts: set[str] = set()
        self._before: tuple[int, dict[str, str]] | None = None

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        *,
        attempt: int | None = None,
        job_id: str = "",
        restart_count: int = 0,
        node: str = "",
        boot_id: str = "",
        retention: Retention | None = None,
        trusted_group: str | int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> CheckpointStore:
        """A store for reading and, once :meth:`fence` was called by one rank of the attempt, for writing.

        Touches nothing.  With ``retention``, each commit is followed by :meth:`prune`.  ``trusted_group`` names the group whose
        members' checkpoints are loaded as if they were ours.
        """
        about = {"job_id": job_id, "restart_count": restart_count, "node": node, "boot_id": boot_id}
        store = cls(root, attempt=attempt, about=about, retention=retention, clock=clock)
        store.trust = Trust.of(trusted_group)
        return store

    # -- owning -----------------------------------------------------------------------------------------------

    def newest_attempt(self) -> int:
        """The newest attempt that has opened this root for writing, -1 before the first."""
        return self.fence_token.current()

    def fence(self) -> None:
        """Make this attempt the owner: older ones can commit, mark and prune nothing from here on.  One rank calls it.

        Also brings the index up to date with the directories.  Raises :class:`Fenced`, or OSError.
        """
        attempt = self._attempt()
        folders.ensure(self.root)
        log.info("checkpoints are in %s, on %s", self.root, filesystem.of(self.root))
        about = {**self.about, "pid": os.getpid(), "at": self._clock.time()}
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
            self.index.append("fence", self._clock.time(), attempt=attempt, **self.about)

    # -- reading ----------------------------------------------------------------------------------------------

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

    # -- saving -----------------------------------------------------------------------------------------------

    def begin(self, step: int, *, expected_bytes: int = 0) -> Draft:
        """A fresh directory to save step ``step`` into.

        When ``expected_bytes`` do not fit, all that retention may spare is pruned first.  Raises :class:`Fenced`,
        :class:`NoSpace`.
        """
        attempt = self._attempt()
        self.fence_token.check(attempt)
        if expected_bytes and space.missing_bytes(self.root, expected_bytes):
            self._make_room(expected_bytes)
        name = names.new_name(step, attempt)
        path = self._bench.make(f"{name}.tmp")
        self._drafts.add(path.name)
        return Draft(name, step, path)

    def commit(
        self,
        draft: Draft,
        *,
        world: int,
        files: dict[str, dict[str, Any]],
        items: list[Item],
        tensors: dict[str, dict[str, Any]] | None = None,
        mesh: dict[str, int] | None = None,
        metrics: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        content: dict[str, str] | None = None,
        versions: dict[str, str] | None = None,
    ) -> Entry:
        """Turn a draft, all of whose files are written and fsynced, into a checkpoint: all of it or nothing.

        Raises :class:`Fenced`, :class:`CheckpointError` or OSError; the draft is then worth nothing.
        """
        try:
            entry = self._commit(draft, world, files, items, tensors, mesh, metrics, extra, content, versions)
        except (OSError, CheckpointError):
            self.check_owner()
            raise
        self._drafts.discard(draft.path.name)
        if self.retention is not None:
            try:
                self.prune(self.retention)
            except (OSError, CheckpointError) as error:
                log.warning("older checkpoints were not pruned, which is tried again after the next save: %s", error)
        return entry

    def abandon(self, draft: Draft) -> None:
        """Throw a draft away; what cannot be removed now stays where nobody takes it for a checkpoint."""
        self._drafts.discard(draft.path.name)
        shutil.rmtree(draft.path, ignore_errors=True)

    def check_owner(self) -> None:
        """Raise :class:`Fenced` when a newer attempt owns the root; that explains any other failure."""
        if self.attempt is not None:
            self.fence_token.check(self.attempt)

    def _commit(
        self,
        draft: Draft,
        world: int,
        files: dict[str, dict[str, Any]],
        items: list[Item],
        tensors: dict[str, dict[str, Any]] | None,
        mesh: dict[str, int] | None,
        metrics: dict[str, Any] | None,
        extra: dict[str, Any] | None,
        content: dict[str, str] | None,
        versions: dict[str, str] | None,
    ) -> Entry:
        attempt = self._attempt()
        check_declared(draft.path, items, files)
        self.fence_token.check(attempt)
        entry = Entry(
            name=draft.name,
            step=draft.step,
            attempt=attempt,
            world=world,
            bytes=sum(int(about["bytes"]) for about in files.values()),
            manifest_sha256="",
            mesh=mesh or {},
            metrics=metrics or {},
            committed_at=round(self._clock.time(), 3),
            save_s=round(time.monotonic() - draft.began, 6),
            alarm=self._alarm(draft.step, content or {}),
            **self.about,
        )
        manifest = Manifest(entry, files, items, tensors or {}, extra or {}, content or {},
                            {"slurm_resilience": __version__, **(versions or {})})  # fmt: skip
        raw = manifest.to_bytes()
        write_atomic(draft.path / names.MANIFEST, raw)
        entry = Manifest.from_bytes(raw, draft.name).entry
        with self._lock.held():
            self._publish(draft, entry)
        return entry

    def _alarm(self, step: int, content: dict[str, str]) -> str:
        """Parameters that are bit for bit those of an earlier step: the save may be writing stale tensors (NeMo RL#3312)."""
        before, self._before = self._before, (step, content)
        if before is None or before[0] == step:
            return ""
        same = [top for top, value in content.items() if top.startswith("model") and before[1].get(top) == value]
        if not same:
            return ""
        alarm = f"{', '.join(same)} unchanged since step {before[0]}"
        log.error("the checkpoint of step %d has the same parameters as that of step %d, bit for bit", step, before[0])
        return alarm

    def _publish(self, draft: Draft, entry: Entry) -> None:
        """Give the draft its name, between an index that announces it and one that has it.

        The rename is the commit: it fails when a newer attempt has moved the draft away, and what it did stands.
        """
        self.check_owner()
        head = self.index.lookup()
        entries = [entry, *(head if head is not None else self.index.newest_usable())]
        self.index.announce(entries)
        try:
            self.check_owner()
            os.rename(draft.path, self.root / entry.name)
        except BaseException:
            self.check_owner()
            self.index.withdraw()
            raise
        fsync_dir(self.root)
        self.check_owner()
        try:
            self.index.confirm(entries)
        except OSError as error:
            log.warning("the index of %s was announced and not replaced (%s); readers know how to take that", self.root, error)
        self.index.append("commit", entry.committed_at, entry=entry.to_json())

    # -- throwing away ----------------------------------------------------------------------------------------

    def prune(self, policy: Retention, *, wait: bool = False) -> list[Entry]:
        """Remove what ``policy`` does not keep, and clean up after saves that never ended; returns what went, oldest first.

        Names go at once, data in the background (or before it returns, with ``wait``).  Raises :class:`Fenced`.
        """
        with self._lock.held():
            gone = self._prune(self._victims(policy))
        self._sweeper.sweep(attempt=self._rank_of_owner(), in_use=frozenset(self._drafts), wait=wait)
        return gone

    def would_prune(self, policy: Retention) -> list[Entry]:
        """What :meth:`prune` would remove now."""
        return self._victims(policy)

    def reading(self, entry: Entry) -> contextlib.AbstractContextManager[None]:
        """While this is held, nobody prunes ``entry``."""
        return lease.reading(self.root, entry.name, attempt=self.attempt, clock=self._clock)

    def _victims(self, policy: Retention) -> list[Entry]:
        owner = self._rank_of_owner()
        return victims(self.entries(), policy, attempt=owner, reading=self._read_now())

    def _read_now(self) -> set[str]:
        return lease.being_read(self.root, owner=self.fence_token.current(), clock=self._clock)

    def _rank_of_owner(self) -> int:
        return self.fence_token.current() if self.attempt is None else self.attempt

    def _prune(self, going: list[Entry]) -> list[Entry]:
        if not going:
            return []
        self.check_owner()
        names_going = {entry.name for entry in going}
        head = self.index.lookup()
        if head is None or any(entry.name in names_going for entry in head):
            self.index.publish(self.index.newest_usable(without=names_going))
            self.index.withdraw()
        gone = []
        for entry in going:
            self.check_owner()
            try:
                where = self._bench.take(self.root / entry.name)
            except FileNotFoundError:
                continue
            if is_read_after_all(self.root, entry.name, where, owner=self.fence_token.current(), clock=self._clock):
                continue
            self._sweeper.dispose(where)
            gone.append(entry)
            self.index.append("prune", self._clock.time(), name=entry.name, attempt=self.attempt)
        return gone

    def _make_room(self, expected_bytes: int) -> None:
        policy = self.retention or Retention()
        self.prune(policy, wait=True)
        if space.missing_bytes(self.root, expected_bytes) and policy.keep_last > 1:
            log.warning("%s has no room for %d bytes: only the newest checkpoint is kept", self.root, expected_bytes)
            self.prune(dataclasses.replace(policy, keep_last=1, keep_quarantined=0), wait=True)
        if space.missing_bytes(self.root, expected_bytes):
            raise space.refuse(self.root, expected_bytes)

    # -- marks ------------------------------------------------------------------------------------------------

    def mark_attempted(self, entry: Entry) -> Entry:
        """Say, before it is loaded, that a load begins: if that kills the job, the next attempt prefers another entry."""
        mark = self._loads_of(entry)
        mark["begun"] = [*mark["begun"], self._attempt()]
        return self._mark(entry, marks.ATTEMPTED, mark, attempts=len(marks.blamed(mark)))

    def excuse(self, attempts: Collection[int]) -> None:
        """Take it off the newest entries that these attempts ended while they loaded: something else had ended them.

        Believed MOST_EXCUSES times an entry; see :func:`marks.blamed`.  Looks at the head's entries only.
        """
        for known in self.index.lookup() or ():
            entry = self.index.current(known)
            if entry is None or not entry.attempts:
                continue
            mark = self._loads_of(entry)
            mark["excused"] = sorted({*mark["excused"], *(a for a in mark["begun"] if a in attempts)})
            left = len(marks.blamed(mark))
            if left < entry.attempts:
                self._mark(entry, marks.ATTEMPTED, mark, attempts=left)

    def _loads_of(self, entry: Entry) -> dict[str, list[int]]:
        """Which attempts began to load this entry since it was last verified, and which of them are excused."""
        mark = marks.get(self.path(entry), marks.ATTEMPTED) or {}
        known = {key: mark.get(key) for key in ("begun", "excused")}
        return {key: value if isinstance(value, list) else [] for key, value in known.items()}

    def mark_verified(self, entry: Entry, by: str) -> Entry:
        """Say that a run trains on from this entry and that all checks of the resume held."""
        marks.drop(self._bench, self.path(entry), marks.ATTEMPTED)
        return self._mark(entry, marks.VERIFIED, {"by": by}, state=State.VERIFIED, by=by, attempts=0)

    def quarantine(self, entry: Entry, reason: str, by: str) -> Entry:
        """Never resume from this entry again; it is kept, with the reason, until it is released or pruned."""
        about = {"reason": reason, "by": by}
        return self._mark(entry, marks.QUARANTINED, about, state=State.QUARANTINED, reason=reason, by=by)

    def release(self, entry: Entry) -> Entry:
        """Take a quarantine back, with the marks of earlier loads."""
        for mark in (marks.QUARANTINED, marks.ATTEMPTED):
            marks.drop(self._bench, self.path(entry), mark)
        return self._refresh(entry.name, "release")

    def pin(self, entry: Entry, *, pinned: bool = True) -> Entry:
        """Keep this entry whatever retention says, or stop keeping it."""
        if pinned:
            return self._mark(entry, marks.PINNED, {}, pinned=True)
        marks.drop(self._bench, self.path(entry), marks.PINNED)
        return self._refresh(entry.name, "unpin")

    def _mark(self, entry: Entry, mark: str, about: dict[str, Any], **changes: Any) -> Entry:
        self.check_owner()
        about = {**about, "attempt": self.attempt, "at": round(self._clock.time(), 3), **self.about}
        marks.put(self._bench, self.path(entry), mark, about)
        return self._refresh(entry.name, mark.strip(".").removesuffix(".json"), **{k: str(v) for k, v in changes.items()})

    def _refresh(self, name: str, op: str, **fields: Any) -> Entry:
        """Bring the head up to date after a mark has changed."""
        self.check_owner()
        current = self.index.entry(name)
        if current is None:
            raise CheckpointError(f"Checkpoint {name} is gone", evidence=f"{self.root / name} does not exist")
        with self._lock.held():
            head = self.index.lookup()
            if head is None or op == "release" or not any(other.usable and other.name != name for other in head):
                self.index.rebuild()
            elif any(entry.name == name for entry in head):
                self.index.publish([current if entry.name == name else entry for entry in head])
                self.index.withdraw()
            self.index.append(op, self._clock.time(), name=name, attempt=self.attempt, **fields)
        return current

    # -- helpers ----------------------------------------------------------------------------------------------

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
