"""[torch] Copies in the node's own memory, for ranks that died on a node that did not.

Each rank keeps the newest two copies of exactly what it holds (its shards, not the whole) in a store of its own, under
``/dev/shm`` or on a local disk.  A relaunch in the same places loads them at memory speed; in any other world, or when one
rank's copy is missing, damaged or not newer than the shared checkpoint, nobody does, and the shared one is loaded.

Memory: up to three times this rank's bytes while a copy is taken, twice otherwise.  The copies die with the node, and are
no checkpoints in the sense of the index.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from slurm_resilience.checkpoint import folders
from slurm_resilience.checkpoint.dcp import ranks
from slurm_resilience.checkpoint.dcp.loading import LoadResult, load_with, restore
from slurm_resilience.checkpoint.dcp.plan import plan_save
from slurm_resilience.checkpoint.dcp.saving import About, finish_save, resolve
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint, MismatchedCheckpoint
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import Fenced

log = logging.getLogger(__name__)

KEEP = 2


def default_folder(run_id: str) -> Path:
    """Where a run's copies live on each node: the user's own folder in shared memory."""
    return Path("/dev/shm") / f"slurm-resilience-{os.geteuid()}" / run_id  # noqa: S108 - closed to others, owner checked on load


class LocalTier:
    """One rank's copies on its node."""

    def __init__(self, folder: str | os.PathLike[str], *, team: Team, attempt: int, mesh: dict[str, int] | None = None) -> None:
        self._team = team
        self._mesh = mesh or {}
        self.folder = Path(folder)
        root = self.folder / f"rank{team.rank:05d}-of-{team.world:05d}"
        folders.ensure(root)
        self._store = CheckpointStore.open(root, attempt=attempt, retention=Retention(KEEP, keep_quarantined=0))
        self._store.fence()

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
        about = About(step, extra=extra or {}, mesh=self._mesh, world=self._team.world)
        planned = plan_save(
            alone, self._store, lambda: ranks.add(_local(resolve(state_dict))[0], per_rank or {}, alone.rank), step
        )
        return finish_save(alone, self._store, planned, about, lambda: planned.planner)

    def common(self, *, newer_than: Entry | None) -> tuple[int, int] | None:
        """The newest (attempt, step) of which every rank has a whole copy, newer than a shared entry; None: there is none.

        Collective.
        """
        mine = {(entry.attempt, entry.step) for entry in self._store.entries() if entry.usable and entry.mesh == self._mesh}

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
        chosen = self.common(newer_than=newer_than)
        if chosen is None:
            return None
        plain = resolve(state_dict)

        def read() -> LoadResult:
            entry = next(each for each in self._store.entries() if (each.attempt, each.step) == chosen and each.usable)
            flat, places = _local(plain)
            try:
                result = load_with(Team.alone(), self._store, entry, flat)
            except CorruptCheckpoint as error:
                self._store.quarantine(entry, error.what, "local load")
                raise
            for key, path in places.items():
                set_element(plain, path, flat[key])
            return result

        try:
            result = self._team.agree(f"loading the local copies of step {chosen[1]}", read)
        except Fenced:
            raise
        except (CorruptCheckpoint, MismatchedCheckpoint) as error:
            log.warning("the local copies of step %d are not used: %s", chosen[1], error)
            return None
        self._team.agree("restoring", lambda: restore(state_dict, plain))
        return result

    def discard(self) -> None:
        """Remove this rank's copies."""
        shutil.rmtree(self._store.root, ignore_errors=True)


def _local(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's part of every leaf by its flattened key, and where the leaves that are no tensors belong."""
    flat, mapping = flatten_state_dict(state_dict)
    out: dict[str, Any] = {}
    places: dict[str, Any] = {}
    for key, value in flat.items():
        out[key] = value.to_local() if isinstance(value, DTensor) else value
        if not isinstance(value, DTensor) and not hasattr(value, "untyped_storage"):
            places[key] = mapping[key]
    return out, places
