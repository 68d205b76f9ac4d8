"""[torch] Who writes what: the plan of a save, made by all ranks together and kept while the layout stays as it is.

Each save compares its own layout with the one that the kept plan was made for, on every rank, so that two state dicts never
share a plan; one rank that differs makes all of them plan anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from slurm_resilience.checkpoint.dcp import layout
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.store import CheckpointStore, Draft


@dataclass
class _Kept:
    """What the last save of a store was planned for, and how.  The last two are rank 0's alone."""

    world: int
    local: SavePlan
    part: SavePlan
    metadata: Metadata | None
    expected_bytes: int


@dataclass
class Planned:
    """One rank's part of one save.  ``draft`` and ``metadata`` are rank 0's alone; ``anew``: no kept plan could be used."""

    planner: DefaultSavePlanner
    part: SavePlan
    directory: Path
    draft: Draft | None
    metadata: Metadata | None
    anew: bool


_kept: weakref.WeakKeyDictionary[CheckpointStore, _Kept] = weakref.WeakKeyDictionary()


def plan_save(team: Team, store: CheckpointStore, state: Callable[[], dict[str, Any]], step: int) -> Planned:
    """Agree on a fresh directory and on who writes what of ``state()`` into it.  Collective.

    Raises on every rank what went wrong on one; then there is no draft left.
    """
    planner = DefaultSavePlanner()
    stage = f"planning the save of step {step}"
    kept = _kept.get(store)
    made: list[SavePlan] = []
    drafts: list[Draft] = []
    layouts: list[tuple[Metadata, int]] = []

    def look() -> bool:
        planner.set_up_planner(state(), is_coordinator=team.leads)
        made.append(planner.create_local_plan())
        return kept is not None and kept.world == team.world and _same(made[0], kept.local)

    def reuse(known: list[bool]) -> Path | None:
        if kept is None or not all(known):
            return None
        drafts.append(store.begin(step, expected_bytes=kept.expected_bytes))
        return drafts[0].path

    def merge(plans: list[SavePlan]) -> list[tuple[SavePlan, Path]]:
        merged, metadata = planner.create_global_plan(plans)
        layouts.append((metadata, layout.expected_bytes(merged)))
        drafts.append(store.begin(step, expected_bytes=layouts[0][1]))
        return [(part, drafts[0].path) for part in merged]

    try:
        directory = team.funnel(stage, look, reuse)
        anew = directory is None
        if directory is None:
            part, directory = team.deal(stage, lambda: made[0], merge)
            metadata, expected = layouts[0] if layouts else (None, 0)
            kept = _kept[store] = _Kept(team.world, made[0], planner.finish_plan(part), metadata, expected)
    except BaseException:
        for draft in drafts:
            store.abandon(draft)
        raise
    assert kept is not None
    return Planned(planner, kept.part, directory, drafts[0] if drafts else None, kept.metadata, anew)


def _same(one: SavePlan, other: SavePlan) -> bool:
    return one.items == other.items and one.planner_data == other.planner_data
