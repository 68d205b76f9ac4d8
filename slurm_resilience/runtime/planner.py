"""Which ranks run on which node?  Thin glue between the nodes that are left and :mod:`slurm_resilience.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.elastic.attempt import plan_attempt


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


def place(nodes: Sequence[str], config: ResilienceConfig) -> Placement:
    """The layout of the next attempt on ``nodes``.  Raises :class:`ConfigError` when the batch or mesh does not fit them."""
    return Placement.of_plan(plan_attempt(list(nodes), config.ranks_per_node, config, scale=config.keep_accumulation))
