"""What does the next attempt look like on these nodes?  Nodes in, one JSON-able plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slurm_resilience.elastic.allocation import Node, allocate
from slurm_resilience.elastic.axes import MeshConstraints
from slurm_resilience.elastic.batch import plan_batch
from slurm_resilience.elastic.mesh import plan_mesh


class AttemptConfig(Protocol):
    """The part of the run's configuration that the planner reads; ``ResilienceConfig`` has it."""

    @property
    def nodes(self) -> tuple[int, int]: ...
    @property
    def global_batch(self) -> int | None: ...
    @property
    def micro_batch(self) -> int | None: ...


def plan_attempt(
    nodes: Sequence[str] | Mapping[str, int],
    ranks_per_node: int,
    config: AttemptConfig,
    *,
    constraints: MeshConstraints | None = None,
    previous: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The plan of one attempt, as plain values that go to every rank.

    ``nodes`` are names in rank order, or names with the slots of each where they differ.  Nodes over the configured
    maximum, and GPUs that no mesh can use, are spares.  Keys of the result: ``ranks``; ``nodes``, those used, in rank
    order; ``ranks_per_node``, of each of them; ``mesh``; ``global_batch``, ``micro_batch``, ``accumulation``,
    ``samples_per_dp_rank`` (None, None, 1 and None without a global batch); ``spares``, a number of GPUs; ``spare_gpus``, by
    node; ``reason``.  Raises :class:`ConfigError` with the smallest change that would help.
    """
    slots = dict(nodes) if isinstance(nodes, Mapping) else dict.fromkeys(nodes, ranks_per_node)
    low, high = config.nodes
    allocation = allocate([Node(name, count) for name, count in slots.items()], minimum=low, maximum=high)
    mesh = plan_mesh(gpus_per_node=allocation.slots, constraints=constraints, max_dp=config.global_batch, previous=previous)
    used = {node.name: count for node, count in zip(allocation.nodes, mesh.used_per_node, strict=True) if count}
    spare = {node.name: count for node, count in zip(allocation.nodes, mesh.spares_per_node, strict=True) if count}
    spare.update((node.name, node.slots) for node in allocation.spare_nodes)
    plan: dict[str, Any] = {
        "ranks": mesh.used,
        "nodes": list(used),
        "ranks_per_node": list(used.values()),
        "mesh": dict(mesh.axes),
        "global_batch": None,
        "micro_batch": None,
        "accumulation": 1,
        "samples_per_dp_rank": None,
        "spares": sum(spare.values()),
        "spare_gpus": spare,
        "reason": mesh.reason,
    }
    if config.global_batch is not None:
        micro = config.micro_batch or -(
            -config.global_batch // _largest_dp(high, slots, mesh.used // mesh.dp_ranks, config.global_batch)
        )
        batch = plan_batch(config.global_batch, micro, mesh.dp_ranks)
        plan["global_batch"], plan["micro_batch"] = config.global_batch, micro
        plan["accumulation"], plan["samples_per_dp_rank"] = batch.accumulation, list(batch.samples_per_rank)
    return plan


def _largest_dp(nodes: int, slots: Mapping[str, int], model: int, global_batch: int) -> int:
    """Data-parallel ranks of the largest allocation, where a micro-batch nobody chose is the whole share of a rank.

    Taking it from there keeps the micro-batch, and so the memory it needs, when the allocation shrinks.
    """
    return max(1, min(global_batch, nodes * max(slots.values()) // model))
