"""[torch] Copies in the node's own memory, for ranks that died on a node that did not.

Each rank keeps the newest two copies of exactly what it holds (its shards, not the whole) in a store of its own, under
``/dev/shm`` or on a local disk.  A relaunch in the same places loads them at memory speed; in any other world, or when one
rank's copy is missing, damaged or not newer than the shared checkpoint, nobody does, and the shared one is loaded.

Memory: up to three times this rank's bytes while a copy is taken, twice otherwise.  The copies die with the node, and are
no checkpoints in the sense of the index.  Copies that nobody has touched for a day, of whatever run, are removed by the next
run that keeps some here: they are never needed, only sometimes useful.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from slurm_resilience.checkpoint import folders
from slurm_resilience.checkpoint.dcp import ranks
from slurm_resilience.checkpoint.dcp.loading import LoadResult, load_with, restore
from slurm_resilience.checkpoint.dcp.plan import plan_save
from slurm_resilience.checkpoint.dcp.read import Watch
from slurm_resilience.checkpoint.dcp.saving import About, finish_save, resolve
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint, MismatchedCheckpoint, UntrustedCheckpoint
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore

log = logging.getLogger(__name__)

KEEP = 2


STALE_S = 86_400.0
_WHOLE = "whole_tensors"


def default_base() -> Path:
    """Where the copies of all runs of this user live on a node."""
    return Path("/dev/shm") / f"slurm-resilience-copies-{os.geteuid()}"  # noqa: S108 - see _private


class LocalTier:
    """One rank's copies on its node, in ``base`` (default: shared memory) under the run's name."""

    def __init__(
        self,
        run_id: str,
        *,
        team: Team,
        attempt: int,
        base: str | os.PathLike[str] | None = None,
        mesh: dict[str, int] | None = None,
    ) -> None:
        """Raises :class:`UntrustedCheckpoint` when others may write to ``base``, OSError, and Fenced."""
        self._team = team
        self._mesh = mesh or {}
        self._base = default_base() if base is None else Path(base)
        self.folder = self._base / run_id
        root = self.folder / f"rank{team.rank:05d}-of-{team.world:05d}"
        _private(self._base)
        folders.ensure(root)
        self._store = CheckpointStore.open(root, attempt=attempt, retention=Retention(KEEP, keep_quarantined=0))
        self._store.fence()
        os.utime(self.folder)
        _sweep(self._base, keep=self.folder)

    def save(
        self,
        state_dict: dict[str, Any],
        *,
        step: int,
        extra: dict[str, Any] | None = None,
        per_rank: dict[str, Any] | None = None,
    ) -> Entry:
        """Copy what this rank holds.  Not collective; the live tensors may change when it returns.

        Raises :class:`CheckpointError` when there is no room; training can go on without the copy.
        """
        alone = Team.alone()
        part = _local(resolve(state_dict))
        about = About(step, extra={**(extra or {}), _WHOLE: part.whole}, mesh=self._mesh, world=self._team.world)
        planned = plan_save(alone, self._store, lambda: ranks.add(part.flat, per_rank or {}, alone.rank), step)
        entry = finish_save(alone, self._store, planned, about, lambda: planned.planner)
        os.utime(self.folder)
        return entry

    def find(self, *, newer_than: Entry | None) -> Entry | None:
        """This rank's own copy of the newest step of which every rank has a whole one, newer than a shared entry.

        Collective; None on all ranks where there is none.  A copy that some attempt began to load and did not say to be good
        is passed over: it may be what ended that attempt.
        """
        chosen = self.common(newer_than=newer_than)
        return None if chosen is None else next(each for each in self._mine() if (each.attempt, each.step) == chosen)

    def peek(self, entry: Entry) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """What was given beside the tensors, and every tensor's whole shape and dtype.  Raises :class:`CorruptCheckpoint`."""
        extra = dict(self._store.manifest(entry).extra)
        whole: dict[str, dict[str, Any]] = extra.pop(_WHOLE)
        return extra, whole

    def begin(self, entry: Entry) -> None:
        """Say, before this copy is loaded, that a load begins: if that kills the ranks, the next attempt takes another."""
        self._store.mark_attempted(entry)

    def accept(self, entry: Entry, by: str) -> None:
        """Say that the run trains on from this copy."""
        self._store.mark_verified(entry, by)

    def refuse(self, entry: Entry, reason: str) -> None:
        """Never load this copy again."""
        self._store.quarantine(entry, reason, "local load")

    def read(self, entry: Entry, state_dict: dict[str, Any], watch: Watch | None = None) -> LoadResult:
        """Load this rank's copy in place, every byte verified.  Collective.  ``watch``: see :func:`load`.

        Raises on every rank :class:`CorruptCheckpoint` or :class:`MismatchedCheckpoint` when it cannot be done on one;
        ``state_dict`` may then be half loaded.
        """
        plain = resolve(state_dict)

        def read() -> LoadResult:
            part = _local(plain)
            result = load_with(Team.alone(), self._store, entry, part.flat, watch=watch)
            for key, path in part.places.items():
                set_element(plain, path, part.flat[key])
            return result

        result = self._team.agree(f"loading the local copies of step {entry.step}", read)
        self._team.agree("restoring", lambda: restore(state_dict, plain))
        extra = {key: value for key, value in result.extra.items() if key != _WHOLE}
        return dataclasses.replace(result, extra=extra)

    def _mine(self) -> list[Entry]:
        return [each for each in self._store.entries() if each.usable and not each.attempts and each.mesh == self._mesh]

    def common(self, *, newer_than: Entry | None) -> tuple[int, int] | None:
        """The newest (attempt, step) of which every rank has a whole copy, newer than a shared entry; None: there is none.

        Collective.
        """
        mine = {(entry.attempt, entry.step) for entry in self._mine()}

        def choose(everyone: list[set[tuple[int, int]]]) -> tuple[int, int] | None:
            shared = set.intersection(*everyone)
            if newer_than is not None:
                shared = {each for each in shared if each > (newer_than.attempt, newer_than.step)}
            return max(shared, default=None)

        return self._team.funnel("looking for local copies", lambda: mine, choose)

    def load(self, state_dict: dict[str, Any], *, newer_than: Entry | None) -> LoadResult | None:
        """Load the newest copy that all ranks have, in place; None when there is none, or when one turns out to be bad.

        Collective.  After None, ``state_dict`` may be half loaded: load the shared checkpoint over all of it.
        """
        entry = self.find(newer_than=newer_than)
        if entry is None:
            return None
        try:
            return self.read(entry, state_dict)
        except (CorruptCheckpoint, MismatchedCheckpoint) as error:
            log.warning("the local copies of step %d are not used: %s", entry.step, error)
            self.refuse(entry, error.what)
            return None

    def discard(self) -> None:
        """Remove this rank's copies, and the folders that are empty then."""
        shutil.rmtree(self._store.root, ignore_errors=True)
        for folder in (self.folder, self._base):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _private(base: Path) -> None:
    """Make ``base``, closed to all others.  Raises :class:`UntrustedCheckpoint` when somebody else got there first."""
    folders.ensure(base.parent)
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    about = os.lstat(base)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedCheckpoint(
            f"{base} is not ours alone, so no copies are kept there",
            evidence=f"it belongs to user {about.st_uid}, its mode is {stat.filemode(about.st_mode)}",
            remedy="remove it, or give checkpoint.local_dir a folder that only you can write to",
        )


def _sweep(base: Path, *, keep: Path) -> None:
    for other in base.iterdir():
        with contextlib.suppress(OSError):
            if other != keep and time.time() - other.lstat().st_mtime > STALE_S and any(other.glob("rank*-of-*")):
                log.info("local copies in %s are older than a day and are removed", other)
                shutil.rmtree(other, ignore_errors=True)


@dataclass(frozen=True)
class _Part:
    """This rank's part of every leaf by its flattened key, where leaves that are no tensors belong, and all whole shapes."""

    flat: dict[str, Any]
    places: dict[str, Any]
    whole: dict[str, dict[str, Any]]


def _local(state_dict: dict[str, Any]) -> _Part:
    flat, mapping = flatten_state_dict(state_dict)
    part = _Part({}, {}, {})
    for key, value in flat.items():
        part.flat[key] = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(value, torch.Tensor):
            part.whole[key] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        else:
            part.places[key] = mapping[key]
    return part
