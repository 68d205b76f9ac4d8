"""[torch] The collective, synchronous save: when it returns, the checkpoint is durable and the latest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.stateful import Stateful

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import layout, ranks
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.dcp.write import Shard, write_shard
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore, Draft


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
    """Save ``state_dict`` as a checkpoint of ``step``; when it returns, the checkpoint is durable, verified and the latest.

    Collective over ``process_group`` (a CPU group; none is needed for one process).  Rank 0 publishes.  ``metrics`` are a
    few numbers for the index, ``extra`` JSON for the manifest, ``per_rank`` tensors or JSON values of this rank alone.

    Raises :class:`CheckpointError` (or :class:`Fenced`) on every rank when anything failed on any of them; then nothing
    was published and older checkpoints are as they were.
    """
    team = Team(process_group)
    planner = DefaultSavePlanner()
    mine = ranks.add(resolve(state_dict), per_rank or {}, team.rank)
    drafts: list[Draft] = []
    layouts: list[Metadata] = []

    def plan() -> SavePlan:
        planner.set_up_planner(mine, is_coordinator=team.leads)
        return planner.create_local_plan()

    def begin(plans: list[SavePlan]) -> list[tuple[SavePlan, Path]]:
        merged, metadata = planner.create_global_plan(plans)
        layouts.append(metadata)
        drafts.append(store.begin(step, expected_bytes=layout.expected_bytes(merged)))
        return [(part, drafts[0].path) for part in merged]

    def commit(shards: list[Shard | None]) -> Entry:
        written = [shard for shard in shards if shard is not None]
        metadata = layouts[0]
        metadata_bytes = layout.write_metadata(drafts[0].path, drafts[0].name, metadata, written)
        files: dict[str, dict[str, Any]] = {shard.file: {"bytes": shard.bytes} for shard in written}
        files[names.METADATA] = {"bytes": len(metadata_bytes), "sha256": sha256(metadata_bytes)}
        items = list(itertools.chain.from_iterable(shard.items for shard in written))
        return store.commit(
            drafts[0],
            world=team.world if world is None else world,
            files=files,
            items=items,
            tensors=layout.tensors(metadata),
            mesh=mesh,
            metrics=metrics,
            extra=extra,
            content=layout.content(items),
            versions={"torch": str(torch.__version__)},
        )

    try:
        part, directory = team.deal("planning the save", plan, begin)
        return team.funnel(
            f"saving step {step}", lambda: write_shard(directory, team.rank, planner.finish_plan(part), planner), commit
        )
    except BaseException:
        for draft in drafts:
            store.abandon(draft)
        raise


def resolve(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A shallow copy in which stateful objects have become their state."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
