"""Where do the bytes of an entry come from, and who marks it before they are loaded?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slurm_resilience.checkpoint import dcp
from slurm_resilience.checkpoint.dcp.local import LocalTier
from slurm_resilience.checkpoint.dcp.read import Watch
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.training.world import World


@dataclass(frozen=True)
class Shared:
    """A checkpoint that all ranks read together."""

    store: CheckpointStore
    entry: Entry
    world: World

    def peek(self) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]:
        # Every rank reads the manifest whose digest rank 0 has chosen: so all see the same one, or say that they do not.
        manifest = self.store.manifest(self.entry)
        return manifest.extra, manifest.tensors

    def begin(self) -> None:
        self.world.team.funnel(
            "marking the checkpoint as attempted", lambda: None, lambda _: self.store.mark_attempted(self.entry) and None
        )

    def load(self, room: dict[str, torch.Tensor], watch: Watch | None = None) -> dcp.LoadResult:
        return dcp.load(self.store, self.entry, room, process_group=self.world.checkpoint, watch=watch)


class Unmarked(Shared):
    """The same, without a trace: for a look by somebody who does not train on."""

    def begin(self) -> None:
        """Leave the marks as they are."""


@dataclass(frozen=True)
class Local:
    """One rank's copy of a step of which all ranks have one."""

    tier: LocalTier
    entry: Entry
    team: Team

    def peek(self) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]:
        return self.tier.peek(self.entry)

    def begin(self) -> None:
        self.team.agree("marking the local copies as attempted", lambda: self.tier.begin(self.entry))

    def load(self, room: dict[str, torch.Tensor], watch: Watch | None = None) -> dcp.LoadResult:
        return self.tier.read(self.entry, room, watch)
