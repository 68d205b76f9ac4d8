"""What does the next attempt look like on these nodes?  Nodes in, one JSON-able plan out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from slurm_resilience.elastic.allocation import Allocation, Node, allocate
from slurm_resilience.elastic.axes import AXES, MeshConstraints
from slurm_resilience.elastic.batch import Deal, plan_batch
from slurm_resilience.elastic.mesh import MeshPlan, plan_mesh
from slurm_resilience.elastic.scaling import Rule, scale_batch


class AttemptConfig(Protocol):
    """The part of the run's configuration that the planner reads; ``ResilienceConfig`` has it."""

    @property
    def nodes(self) -> tuple[int, int]: ...
    @property
    def global_batch(self) -> int | None: ...
    @property
    def micro_batch(self) -> int | None: ...
    @property
    def mesh(self) -> Any: ...


def plan_attempt(
    nodes: Sequence[str] | Sequence[Node] | Mapping[str, int],
    ranks_per_node: int,
    config: AttemptConfig,
    *,
    constraints: MeshConstraints | None = None,
    previous: Mapping[str, int] | None = None,
    before: Collection[str] = (),
    deal: Deal = "even",
    scale: Rule | None = None,
) -> dict[str, Any]:
    """The plan of one attempt, as plain values that go to every rank.

    ``nodes`` are names in rank order, names with the slots of each, or :class:`Node` values with states and marks.  Nodes
    over the configured maximum, and GPUs that no mesh can use, are spares.  ``previous`` is the mesh of the last attempt and
    ``before`` its nodes: among equals, the fewest changes win.  ``ranks_per_node`` is the most that any node can hold, whatever
    those at hand do.  Constraints are ``config.mesh`` unless given.  With ``scale`` the accumulation of the largest allocation
    is kept instead of the batch.  Keys of the result:

    ``ranks`` · ``nodes``, those used, in rank order · ``ranks_per_node``, of each of them · ``mesh`` · ``global_batch``,
    ``micro_batch``, ``accumulation``, ``samples_per_dp_rank`` (None, None, 1, None without a global batch) · ``lr_factor``
    (1.0 without ``scale``) · ``spares``, a number of GPUs · ``spare_gpus``, by node · ``left_out``, why, by node · ``reason``

    Raises :class:`ConfigError` with the smallest change that would help.
    """
    low, high = config.nodes
    known = _nodes(nodes, ranks_per_node)
    allocation = allocate(known, minimum=low, maximum=high, before=before)
    rules = constraints or constraints_of(config.mesh)
    mesh = plan_mesh(gpus_per_node=allocation.slots, constraints=rules, max_dp=config.global_batch, previous=previous)
    most = config.nodes[1] * max(ranks_per_node, *(node.slots or 0 for node in known))
    return {**_placement(allocation, mesh, previous), **_batch(config, most, mesh, deal, scale)}


def constraints_of(mesh: Any) -> MeshConstraints:
    """The constraints in a configuration's mesh section."""
    return MeshConstraints.of(**{name: getattr(mesh, name) for name in AXES})


def _nodes(nodes: Sequence[str] | Sequence[Node] | Mapping[str, int], ranks_per_node: int) -> list[Node]:
    if isinstance(nodes, Mapping):
        return [Node(name, count) for name, count in nodes.items()]
    return [Node(node, ranks_per_node) if isinstance(node, str) else node for node in nodes]


def _placement(allocation: Allocation, mesh: MeshPlan, previous: Mapping[str, int] | None) -> dict[str, Any]:
    used = {node.name: count for node, count in zip(allocation.nodes, mesh.used_per_node, strict=True) if count}
    spare = {node.name: count for node, count in zip(allocation.nodes, mesh.spares_per_node, strict=True) if count}
    spare.update((node.name, node.slots or 0) for node in allocation.spare_nodes)
    partly = [f"{used[name]} used and {count} spare on {name}" for name, count in spare.items() if name in used]
    partly += [f"{node.name} is spare, a suspect: {node.suspect}" for node in allocation.spare_nodes if node.suspect]
    partly += [f"{node.name} is used though a suspect: {node.suspect}" for node in allocation.nodes if node.suspect]
    if previous is not None:
        changed = [
            f"{name} {previous.get(name, 1)} to {size}" for name, size in mesh.axes.items() if previous.get(name, 1) != size
        ]
        partly.append("changed: " + ", ".join(changed) if changed else "the mesh of the attempt before")
    return {
        "ranks": mesh.used,
        "nodes": list(used),
        "ranks_per_node": list(used.values()),
        "mesh": dict(mesh.axes),
        "spares": sum(spare.values()),
        "spare_gpus": spare,
        "left_out": dict(allocation.left_out),
        "reason": "; ".join([mesh.reason, *partly]),
    }


def _batch(config: AttemptConfig, most: int, mesh: MeshPlan, deal: Deal, scale: Rule | None) -> dict[str, Any]:
    if config.global_batch is None:
        return {"global_batch": None, "micro_batch": None, "accumulation": 1, "samples_per_dp_rank": None, "lr_factor": 1.0}
    # The largest allocation that can be, of ``most`` ranks, is the reference: a micro-batch that nobody chose is a rank's whole
    # share there, so that it, and the memory it needs, stay the same when the allocation shrinks or its largest node is lost.
    reference = max(mesh.dp_ranks, min(config.global_batch, most // (mesh.used // mesh.dp_ranks)))
    micro = config.micro_batch or -(-config.global_batch // reference)
    total, lr_factor = config.global_batch, 1.0
    if scale is not None:
        scaled = scale_batch(total, reference, mesh.dp_ranks, scale)
        total, lr_factor = scaled.global_batch, scaled.lr_factor
    batch = plan_batch(total, micro, mesh.dp_ranks, deal=deal)
    return {
        "global_batch": total,
        "micro_batch": micro,
        "accumulation": batch.accumulation,
        "samples_per_dp_rank": list(batch.samples_per_rank),
        "lr_factor": lr_factor,
    }
