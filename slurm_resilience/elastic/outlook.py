"""What would the experiment look like on this allocation and on every smaller one?

Thousands of allocations are planned in one go: a shape is chosen from a few, and ranks are counted, not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from slurm_resilience.elastic.axes import WORLD_AXES, MeshConstraints
from slurm_resilience.elastic.batch import BatchPlan, Deal
from slurm_resilience.elastic.mesh import MeshFitter, node_sizes, plan_mesh
from slurm_resilience.elastic.scaling import Rule, scale_batch
from slurm_resilience.errors import ConfigError


@dataclass(frozen=True)
class Prospect:
    """One allocation.  ``batch`` is None without a global batch."""

    nodes: int
    gpus: int
    mesh: dict[str, int]
    batch: BatchPlan | None
    lr_factor: float

    @property
    def ranks(self) -> int:
        """Ranks that train."""
        return prod(self.mesh[name] for name in WORLD_AXES)

    @property
    def spares(self) -> int:
        """GPUs that no mesh can use."""
        return self.gpus - self.ranks

    def to_json(self, *, list_samples: bool) -> dict[str, Any]:
        """Plain values; ``samples`` are pairs of (how many data-parallel ranks, samples of each)."""
        out: dict[str, Any] = {
            "nodes": self.nodes,
            "gpus": self.gpus,
            "mesh": self.mesh,
            "ranks": self.ranks,
            "spares": self.spares,
        }
        if self.batch is not None:
            out["global_batch"] = self.batch.global_batch
            out["micro_batch"] = self.batch.micro_batch
            out["accumulation"] = self.batch.accumulation
            out["lr_factor"] = self.lr_factor
            out["samples"] = [list(pair) for pair in self.batch.runs]
            if list_samples:
                samples = self.batch.samples_per_rank
                out["samples_per_dp_rank"] = list(samples)
                out["weights"] = [count / self.batch.global_batch for count in samples]
        return out


def outlook(
    gpus_per_node: Sequence[int],
    constraints: MeshConstraints,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    min_nodes: int = 1,
    deal: Deal = "even",
    scale: Rule | None = None,
) -> list[Prospect]:
    """The prospects of all the nodes, then of all but the last, and so on: to ``min_nodes``, or to the last that fits.

    Raises :class:`ConfigError`, with the smallest change that would help, when not even all nodes are enough.
    """
    nodes = node_sizes(None, gpus_per_node)
    if min_nodes > len(nodes):
        raise ConfigError(
            f"The smallest allocation of {min_nodes} nodes is larger than the whole one of {len(nodes)}",
            remedy="give a smaller minimum, or more nodes",
        )
    plan = plan_mesh(constraints=constraints, gpus_per_node=nodes, max_dp=global_batch)
    micro = micro_batch or (-(-global_batch // plan.dp_ranks) if global_batch else None)
    fitter = MeshFitter(constraints, largest_node=max(nodes), gpus=sum(nodes), max_dp=global_batch, previous=plan.axes)
    left, gpus = Counter(nodes), sum(nodes)
    prospects = []
    for count in range(len(nodes), max(1, min_nodes) - 1, -1):
        found = fitter.fit(left) if gpus else None
        if found is None:
            break
        mesh, batch, lr_factor = found[0], None, 1.0
        if global_batch and micro:
            total, dp = global_batch, mesh["dp_replicate"] * mesh["dp_shard"]
            if scale is not None:
                scaled = scale_batch(global_batch, plan.dp_ranks, dp, scale)
                total, lr_factor = scaled.global_batch, scaled.lr_factor
            batch = BatchPlan(total, micro, dp, deal)
        prospects.append(Prospect(count, gpus, mesh, batch, lr_factor))
        last = nodes[count - 1]
        left[last] -= 1
        gpus -= last
        if not left[last]:
            del left[last]
    return prospects
