"""A checkpoint root as its users see it: begin and commit a save, find the latest, mark what was found out, throw away.

Everything here works on names, sizes and JSON; tensors are the business of the package ``dcp``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience import __version__
from slurm_resilience._atomic import fsync_dir, write_atomic
from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.checkpoint import lease, names, space
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.manifest import Item, Manifest, check_declared
from slurm_resilience.checkpoint.marking import MarkedRoot
from slurm_resilience.checkpoint.prune import Sweeper, is_read_after_all, victims
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.trust import Trust
from slurm_resilience.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """A save that has begun: ``path`` is a fresh directory that nobody takes for a checkpoint."""

    name: str
    step: int
    path: Path
    began: float = field(default_factory=time.monotonic)


class CheckpointStore(MarkedRoot):
    """One checkpoint root, opened by one attempt (or, with ``attempt`` None, by a person or a reader)."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        attempt: int | None,
        about: dict[str, Any],
        retention: Retention | None,
        clock: Clock,
        run_id: str = "",
    ) -> None:
        super().__init__(root, attempt=attempt, about=about, clock=clock, run_id=run_id)
        self.retention = retention
        self._sweeper = Sweeper(self.root)
        self._drafts: set[str] = set()
        self._before: tuple[int, dict[str, str]] | None = None

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        *,
        attempt: int | None = None,
        run_id: str = "",
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
        members' checkpoints are loaded as if they were ours.  A root belongs to the first ``run_id`` that fences it; whoever
        gives none is told apart by its attempt number alone.
        """
        about = {"job_id": job_id, "restart_count": restart_count, "node": node, "boot_id": boot_id}
        store = cls(root, attempt=attempt, about=about, retention=retention, clock=clock, run_id=run_id)
        store.trust = Trust.of(trusted_group)
        return store

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

    def prune(self, policy: Retention, *, wait: bool = False, bad: Collection[str] = ()) -> list[Entry]:
        """Remove what ``policy`` does not keep, and clean up after saves that never ended; returns what went, oldest first.

        Names go at once, data in the background (or before it returns, with ``wait``).  The entries named in ``bad`` are kept
        and count for nothing.  Raises :class:`Fenced`.
        """
        with self._lock.held():
            gone = self._prune(self._victims(policy, bad))
        self._sweeper.sweep(attempt=self._rank_of_owner(), in_use=frozenset(self._drafts), wait=wait)
        return gone

    def would_prune(self, policy: Retention, *, bad: Collection[str] = ()) -> list[Entry]:
        """What :meth:`prune` would remove now."""
        return self._victims(policy, bad)

    def _victims(self, policy: Retention, bad: Collection[str] = ()) -> list[Entry]:
        owner = self._rank_of_owner()
        return victims(self.entries(), policy, attempt=owner, reading=self._read_now(), bad=bad)

    def _read_now(self) -> set[str]:
        return lease.being_read(self.root, owner=self.fence_token.current(), clock=self._clock)

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
