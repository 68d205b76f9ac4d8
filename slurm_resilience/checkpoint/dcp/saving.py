"""[torch] The collective save: planned together, written by each rank, committed by the first; and its synchronous form."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import layout, ranks
from slurm_resilience.checkpoint.dcp.plan import Planned, plan_save
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.dcp.write import Shard, Source, write_shard
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself besides its tensors."""

    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    world: int | None = None


def save(
    store: CheckpointStore,
    state_dict: dict[str, Any],
    *,
    step: int,
    metrics: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    per_rank: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    world: int | None = None,
    mesh: dict[str, int] | None = None,
) -> Entry:
    """Save ``state_dict`` as a checkpoint of ``step``; when it returns, the checkpoint is durable, checked and the latest.

    Collective over ``process_group`` (a CPU group; none is needed for one process).  Rank 0 publishes.  ``metrics`` are a
    few numbers for the index, ``extra`` JSON for the manifest, ``per_rank`` tensors or JSON values of this rank alone.

    Raises :class:`CheckpointError` (or :class:`Fenced`) on every rank when anything failed on any of them; then nothing
    was published and older checkpoints are as they were.
    """
    team = Team(process_group)
    about = About(step, metrics or {}, extra or {}, mesh or {}, world)
    planned = plan_save(team, store, lambda: ranks.add(resolve(state_dict), per_rank or {}, team.rank), step)
    return finish_save(team, store, planned, about, lambda: planned.planner)


def finish_save(team: Team, store: CheckpointStore, planned: Planned, about: About, source: Callable[[], Source]) -> Entry:
    """Write every rank's part and commit.  Collective.  ``source`` gives the data, or raises what kept it from being there."""

    def write() -> Shard | None:
        data = source()
        with _explained(store):
            return write_shard(planned.directory, team.rank, planned.part, data)

    def commit(shards: list[Shard | None]) -> Entry:
        assert planned.draft is not None
        assert planned.metadata is not None
        written = [shard for shard in shards if shard is not None]
        with _explained(store):
            raw = layout.write_metadata(planned.directory, planned.draft.name, planned.metadata, written)
        files: dict[str, dict[str, Any]] = {shard.file: {"bytes": shard.bytes} for shard in written}
        files[names.METADATA] = {"bytes": len(raw), "sha256": sha256(raw)}
        items = list(itertools.chain.from_iterable(shard.items for shard in written))
        return store.commit(
            planned.draft,
            world=team.world if about.world is None else about.world,
            files=files,
            items=items,
            tensors=layout.tensors(planned.metadata),
            mesh=about.mesh,
            metrics=about.metrics,
            extra=about.extra,
            content=layout.content(items),
            versions={"torch": str(torch.__version__)},
        )

    try:
        return team.funnel(f"saving step {about.step}", write, commit)
    except BaseException:
        if planned.draft is not None:
            store.abandon(planned.draft)
        raise


@contextlib.contextmanager
def _explained(store: CheckpointStore) -> Iterator[None]:
    """Raise :class:`Fenced` instead of what a writer sees when a fence takes the directory away under it."""
    try:
        yield
    except OSError:
        store.check_owner()
        raise


def resolve(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A shallow copy in which stateful objects have become their state."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
