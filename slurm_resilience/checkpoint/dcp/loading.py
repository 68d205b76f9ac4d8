"""[torch] The collective load: one entry, or the newest that is whole; everything that is used is verified on the way."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.stateful import Stateful

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import layout, ranks
from slurm_resilience.checkpoint.dcp.read import ShardReader, Watch
from slurm_resilience.checkpoint.dcp.saving import resolve
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.manifest import Manifest, check_files, read_manifest
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import NoValidCheckpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadResult:
    """What came with a loaded checkpoint.

    ``per_rank`` holds what this rank had saved for itself; None when the world size has changed (or nothing was saved),
    so that all ranks take the same decision.
    """

    entry: Entry
    extra: dict[str, Any]
    per_rank: dict[str, Any] | None
    bytes_read: int
    seconds: float
    rejected: list[tuple[Entry, str]] = field(default_factory=list)


def load(
    store: CheckpointStore,
    entry: Entry | None,
    state_dict: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    watch: Watch | None = None,
) -> LoadResult:
    """Load ``entry`` into the tensors of ``state_dict``, in place, whatever world it was saved by; every byte used is verified.

    Collective; the entry of rank 0 counts, on every rank.  Nothing is touched before all ranks have found all files and
    keys; after that, a failure leaves ``state_dict`` half loaded: load an older entry over all of it.  ``watch`` is told the
    digests of what was read in place.

    Raises :class:`CorruptCheckpoint` when the bytes are not those that were saved, :class:`MismatchedCheckpoint` when they
    belong to another model, :class:`UntrustedCheckpoint` when somebody else could have written them.
    """
    return load_with(Team(process_group), store, entry, state_dict, strict=strict, watch=watch)


def load_with(
    team: Team,
    store: CheckpointStore,
    entry: Entry | None,
    state_dict: dict[str, Any],
    *,
    strict: bool = True,
    watch: Watch | None = None,
) -> LoadResult:
    """:func:`load` by a team that exists already."""
    with store.reading(entry) if team.leads and entry is not None else contextlib.nullcontext():
        return _load(team, store, entry, state_dict, strict, watch)


def _load(
    team: Team, store: CheckpointStore, entry: Entry | None, state_dict: dict[str, Any], strict: bool, watch: Watch | None
) -> LoadResult:
    began = time.monotonic()

    def choose(_: list[None]) -> tuple[Entry, bytes]:
        if entry is None:
            raise NoValidCheckpoint("There is no checkpoint to load", evidence=f"none was given for {store.root}")
        return entry, _read_trusted(store, entry)

    chosen, raw = team.funnel("choosing the checkpoint", lambda: None, choose)
    planner = DefaultLoadPlanner()

    def plan() -> tuple[dict[str, Any], Manifest, LoadPlan, ShardReader, bool]:
        plain = resolve(state_dict)
        manifest = Manifest.from_bytes(raw, chosen.name)
        metadata = layout.metadata(manifest)
        own = ranks.ask(plain, metadata, team.rank, team.world)
        layout.check_matches(plain, metadata, chosen.name, strict=strict)
        planner.set_up_planner(plain, metadata, team.leads)
        local = planner.create_local_plan()
        reader = ShardReader(store.path(chosen), manifest, store.trust)
        reader.check(local)
        return plain, manifest, local, reader, own

    plain, manifest, local, reader, own = team.agree("planning the load", plan)
    team.agree(f"loading {chosen.name}", lambda: reader.read(planner.finish_plan(local), planner, watch))
    mine = ranks.take(plain) if own else None
    team.agree("restoring", lambda: restore(state_dict, plain))
    return LoadResult(chosen, manifest.extra, mine, reader.bytes_read, time.monotonic() - began)


def load_latest(
    store: CheckpointStore,
    state_dict: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    by: str = "load",
) -> LoadResult | None:
    """Load the newest checkpoint that is whole; each bad one on the way is quarantined with its reason.  None: there is none.

    Collective.  Each entry is marked as attempted before it is read.  Raises :class:`NoValidCheckpoint` when entries exist
    and none of them can be loaded; whatever is no fault of the checkpoint (another model, a lost rank) is raised at once.
    """
    team = Team(process_group)
    rejected: list[tuple[Entry, str]] = []
    candidates = store.candidates() if team.leads else iter(())

    def pick(_: list[None]) -> Entry | None:
        found = next(candidates, None)
        return store.mark_attempted(found) if found is not None and store.attempt is not None else found

    while True:
        entry = team.funnel("choosing the checkpoint", lambda: None, pick)
        if entry is None:
            break
        try:
            result = load_with(team, store, entry, state_dict, strict=strict)
        except CorruptCheckpoint as error:
            reason = f"{error.what} ({error.evidence})" if error.evidence else error.what
            log.error("checkpoint %s is not used: %s", entry.name, reason)
            rejected.append((entry, reason))
            team.funnel("quarantining", lambda: None, lambda _, e=entry, r=reason: store.quarantine(e, r, by))  # type: ignore[misc]
            continue
        return LoadResult(result.entry, result.extra, result.per_rank, result.bytes_read, result.seconds, rejected)
    if rejected:
        raise NoValidCheckpoint(
            f"None of the {len(rejected)} checkpoints in {store.root} can be loaded",
            evidence="; ".join(f"{entry.name}: {reason}" for entry, reason in rejected[:4]),
            remedy=f"slurm-resilience checkpoints verify {store.root}",
        )
    return None


def restore(state_dict: dict[str, Any], plain: dict[str, Any]) -> None:
    """Give loaded state back to its owners: stateful objects load it, other entries are replaced."""
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(plain[key])
        else:
            state_dict[key] = plain[key]


def _read_trusted(store: CheckpointStore, entry: Entry) -> bytes:
    """The manifest's bytes, after owner, mode, manifest, file lengths and the digest of ``.metadata`` were checked."""
    directory = store.path(entry)
    if not directory.is_dir():
        raise CorruptCheckpoint(f"Checkpoint {entry.name} is gone", evidence=f"{directory} does not exist")
    store.trust.check_directory(directory)
    manifest = read_manifest(directory, expect_sha256=entry.manifest_sha256)
    check_files(directory, manifest)
    path = directory / names.METADATA
    store.trust.check(path, os.lstat(path))
    found = sha256(path.read_bytes())
    if found != manifest.files[names.METADATA]["sha256"]:
        raise CorruptCheckpoint(
            f".metadata of checkpoint {entry.name} is not the one that was committed", evidence=f"SHA-256 {found[:16]}…"
        )
    return (directory / names.MANIFEST).read_bytes()
