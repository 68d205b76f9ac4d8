"""Which run, which rank, with which configuration: everything that a ``Run`` knows about itself before it does anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_resilience.progress.contract import RankContract
from slurm_resilience.training.link import AgentLink, Link, LocalLink, claim_attempt, describe_run
from slurm_resilience.training.settings import Settings, settle
from slurm_resilience.training.world import World


class Identity:
    """The read-only side of a ``Run``.  Touches no file and nothing of torch.distributed."""

    def __init__(self, folder: str | os.PathLike[str] | None, script_settings: Mapping[str, Any]) -> None:
        self._contract = RankContract.from_environment()
        self._settings: Settings = settle(script_settings, self._contract.settings if self._contract else None)
        self._world = World()
        self._link: Link = AgentLink(self._contract, self._world.rank) if self._contract else LocalLink()
        self._attempt = self._contract.attempt if self._contract else 0
        self._run_id = self._contract.run_id if self._contract else ""
        given = folder or (self._contract.run_dir if self._contract else os.environ.get("RESILIENCE_RUN_DIR"))
        self._folder = Path(given or "resilience-run").absolute()

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def local_rank(self) -> int:
        return self._world.local_rank

    @property
    def attempt(self) -> int:
        """The number of this launch over the life of the run; without an agent it is known after ``resume()``."""
        return self._attempt

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def supervised(self) -> bool:
        """An agent started this rank and looks after it."""
        return self._contract is not None

    @property
    def seed(self) -> int:
        return self._settings.seed

    @property
    def plan(self) -> dict[str, Any]:
        """What the supervisor planned for this world: mesh, batch, accumulation; empty without one."""
        return dict(self._contract.plan) if self._contract else {}

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes pp, dp_replicate, dp_shard, cp, tp, ep; without a plan all ranks are on dp_shard."""
        mesh = self.plan.get("mesh")
        if isinstance(mesh, Mapping):
            return {str(axis): int(size) for axis, size in mesh.items()}
        return {"dp_shard": self.world_size}

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step that the run was configured with; with ``keep_accumulation`` those of this world."""
        if self.keep_accumulation is not None:
            return self.plan.get("global_batch")
        return self._settings.global_batch or self.plan.get("global_batch")

    @property
    def keep_accumulation(self) -> str | None:
        """The rule by which batch and learning rate follow the world, where the user asked for it."""
        return self._settings.keep_accumulation

    @property
    def micro_batch(self) -> int | None:
        """Samples per forward pass that the run was configured with, or that the supervisor chose."""
        return self._settings.micro_batch or self.plan.get("micro_batch")

    @property
    def dp_ranks(self) -> int:
        """Ranks with samples of their own."""
        return self.mesh.get("dp_replicate", 1) * self.mesh.get("dp_shard", 1)

    @property
    def dp_rank(self) -> int:
        """This rank's place among those.  Ranks are laid out as (pp, dp_replicate, dp_shard, cp, tp), the last one fastest."""
        return self.rank // (self.mesh.get("cp", 1) * self.mesh.get("tp", 1)) % self.dp_ranks

    def _open(self) -> None:
        """Without an agent: number this attempt and begin its record.  All ranks must come."""
        if not isinstance(self._link, LocalLink):
            return
        wanted = {"seed": self.seed, "global_batch": self.global_batch, "micro_batch": self.micro_batch}

        def claim(_: list[None]) -> tuple[int, str]:
            return claim_attempt(self._folder), describe_run(self._folder, wanted)

        self._attempt, self._run_id = self._world.team.funnel("opening the run's folder", lambda: None, claim)
        if self.rank == 0:
            self._link.open(self._folder, attempt=self._attempt, world=self.world_size)

    def _checkpoint_root(self) -> Path:
        chosen = self._settings.checkpoint_dir or (self._contract.checkpoints if self._contract else "")
        return Path(chosen).absolute() if chosen else self._folder / "checkpoints"
