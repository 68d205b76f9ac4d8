"""Which ranks run on which node?  Thin glue between the nodes that are left and :mod:`slurm_resilience.elastic`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.elastic.allocation import Node
from slurm_resilience.elastic.attempt import constraints_of, plan_attempt
from slurm_resilience.elastic.outlook import outlook
from slurm_resilience.elastic.slots import slots_per_node
from slurm_resilience.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """One attempt's layout.  ``ranks[i]`` are the ranks of ``nodes[i]``, in the order of their local ranks."""

    nodes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    plan: dict[str, Any]

    @property
    def world(self) -> int:
        return sum(map(len, self.ranks))

    def node_of(self) -> dict[int, str]:
        """Rank → node."""
        return {rank: node for node, ranks in zip(self.nodes, self.ranks, strict=True) for rank in ranks}

    @classmethod
    def of_plan(cls, plan: dict[str, Any]) -> Placement:
        """The layout that a plan describes: ranks are numbered node by node."""
        ranks: list[tuple[int, ...]] = []
        start = 0
        for count in plan["ranks_per_node"]:
            ranks.append(tuple(range(start, start + count)))
            start += count
        return cls(tuple(plan["nodes"]), tuple(ranks), plan)


def look_at(
    names: Sequence[str],
    config: ResilienceConfig,
    *,
    gpus: Mapping[str, int] | None = None,
    gpu_request: Mapping[str, str] | None = None,
    suspects: Mapping[str, str] | None = None,
) -> list[Node]:
    """Nodes that could run ranks, as the planner sees them: what each can hold, and what speaks against it.

    ``gpus``: those that the job holds on each node, where that is known; one that is not on it keeps the configured number of
    ranks.  ``gpu_request``: Slurm's variables about them.  ``suspects``: node → reason.  Raises :class:`ConfigError` when no
    node has as many GPUs as one rank needs.
    """
    slots = slots_per_node(names, ranks_per_node=config.ranks_per_node, gpus=gpus, environment=gpu_request)
    return [Node(name, slots[name], suspect=(suspects or {}).get(name, "")) for name in names]


def place(
    nodes: Sequence[Node] | Sequence[str],
    config: ResilienceConfig,
    *,
    previous: Mapping[str, int] | None = None,
    before: Collection[str] = (),
) -> Placement:
    """The layout of the next attempt on the best of ``nodes``, which are in rank order; plain names hold all their ranks.

    ``previous`` and ``before`` are the mesh and the nodes of the attempt before: among equals, the fewest changes win.  Raises
    :class:`ConfigError` when the batch or mesh does not fit them.
    """
    plan = plan_attempt(nodes, config.ranks_per_node, config, previous=previous, before=before, scale=config.keep_accumulation)
    return Placement.of_plan(plan)


def fewest_that_fit(config: ResilienceConfig, most: int) -> int:
    """The fewest nodes, down from ``most``, that batch and mesh fit on.  Raises :class:`ConfigError` when not even those do."""
    whole = [config.ranks_per_node] * most
    return outlook(whole, constraints_of(config.mesh), global_batch=config.global_batch)[-1].nodes


def check_fit(config: ResilienceConfig) -> None:
    """Refuse a smallest allocation that nothing could be trained on.  Raises :class:`ConfigError` with what would do."""
    low, high = config.nodes
    fewest = fewest_that_fit(config, high)
    if low < fewest:
        raise ConfigError(
            f"nodes={low}-{high} begins below what the mesh needs: it does not fit on fewer than {fewest} nodes",
            evidence=f"{config.ranks_per_node} ranks on each node; `slurm-resilience plan mesh` shows every smaller allocation",
            remedy=f"ask for --nodes {fewest}-{high}, or allow a smaller mesh",
        )
