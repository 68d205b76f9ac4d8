"""Which nodes does this attempt use, and which are left out, for what reason?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_resilience.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """One node as the planner sees it; ``slots`` is how many ranks it can hold, usually its usable GPUs."""

    name: str
    slots: int
    left_out: str = ""


@dataclass(frozen=True)
class Allocation:
    """The nodes of an attempt in rank order, the usable ones beyond the maximum, and why others are left out."""

    nodes: tuple[Node, ...]
    spare_nodes: tuple[Node, ...]
    left_out: dict[str, str]

    @property
    def slots(self) -> tuple[int, ...]:
        """How many ranks each node can hold."""
        return tuple(node.slots for node in self.nodes)


def allocate(nodes: Sequence[Node], *, minimum: int = 1, maximum: int | None = None) -> Allocation:
    """The first ``maximum`` usable nodes, in the order given.  Raises :class:`ConfigError` below ``minimum``."""
    usable = [node for node in nodes if not node.left_out and node.slots > 0]
    left_out = {node.name: node.left_out or "it has no usable GPU" for node in nodes if node not in usable}
    if len(usable) < minimum:
        raise ConfigError(
            f"{len(usable)} usable nodes are fewer than the minimum of {minimum}",
            evidence="; ".join(f"{name}: {why}" for name, why in left_out.items()) or f"{len(nodes)} nodes were given",
            remedy=f"lower the minimum to {len(usable)}, or give {minimum - len(usable)} more nodes",
        )
    cut = len(usable) if maximum is None else maximum
    return Allocation(tuple(usable[:cut]), tuple(usable[cut:]), left_out)
