"""Which nodes does this attempt use, and which are left out, for what reason?

Unknown is not good news: a node that nobody could ask about comes after those that are known to be up.  Whoever looks keeps
what was known of it (``runtime/drain_watch.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurm_resilience.errors import ConfigError


class NodeState(str, enum.Enum):
    """What is known of a node.  DRAINED includes draining: Slurm starts nothing new there."""

    UP = "up"
    DOWN = "down"
    DRAINED = "drained"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Node:
    """One node as the planner sees it.

    ``slots`` is how many ranks it can hold, usually its usable GPUs; None: nobody could tell.  ``suspect`` and
    ``excluded`` are reasons, "" where there is none.  A suspect node is used only where the minimum needs it; an excluded one
    never.  A ``spare`` is used when the others are too few.
    """

    name: str
    slots: int | None = None
    state: NodeState = NodeState.UP
    suspect: str = ""
    excluded: str = ""
    spare: bool = False

    @property
    def unusable(self) -> str:
        """Why no rank may run here; "" when one may."""
        if self.excluded:
            return f"excluded: {self.excluded}"
        if self.state in (NodeState.DOWN, NodeState.DRAINED):
            return str(self.state)
        if self.slots is None:
            return "nobody could tell how many ranks it can hold"
        return "" if self.slots > 0 else "no usable slot"


@dataclass(frozen=True)
class Allocation:
    """The nodes of an attempt in rank order; those that could help but are not needed; why the others are left out."""

    nodes: tuple[Node, ...]
    spare_nodes: tuple[Node, ...]
    left_out: dict[str, str]

    @property
    def slots(self) -> tuple[int, ...]:
        """How many ranks each node can hold."""
        return tuple(node.slots or 0 for node in self.nodes)


def allocate(
    nodes: Sequence[Node], *, minimum: int = 1, maximum: int | None = None, before: Collection[str] = ()
) -> Allocation:
    """The best ``maximum`` nodes for an attempt, in the order given.

    Preferred are known-up nodes before unknown ones, regular ones before spares, those with more slots before those
    with fewer, and among equals those of the attempt ``before``; suspects come last and only up to ``minimum``.  Raises
    :class:`ConfigError` when fewer than that can be used.
    """
    _refuse_nonsense(nodes, minimum, maximum)
    left_out = {node.name: node.unusable for node in nodes if node.unusable}
    usable = [node for node in nodes if not node.unusable]
    if len(usable) < minimum:
        raise ConfigError(
            f"{len(usable)} usable node{'s' * (len(usable) != 1)} cannot hold the minimum of {minimum}",
            evidence="; ".join(f"{name}: {why}" for name, why in left_out.items()) or f"{len(nodes)} nodes were given",
            remedy=(f"lower the minimum to {len(usable)}, or " if usable else "")
            + f"give {minimum - len(usable)} more usable node{'s' * (minimum - len(usable) > 1)}",
        )
    ranked = sorted(
        usable,
        key=lambda node: (
            bool(node.suspect), node.spare, node.state is NodeState.UNKNOWN, -(node.slots or 0), node.name not in before,
        ),
    )  # fmt: skip
    clean = sum(not node.suspect for node in ranked)
    count = min(len(ranked) if maximum is None else maximum, max(clean, minimum))
    chosen = {node.name for node in ranked[:count]}
    return Allocation(
        tuple(node for node in usable if node.name in chosen),
        tuple(node for node in usable if node.name not in chosen),
        left_out,
    )


def _refuse_nonsense(nodes: Sequence[Node], minimum: int, maximum: int | None) -> None:
    if minimum < 1 or (maximum is not None and maximum < minimum):
        raise ConfigError(
            f"At least {minimum} and at most {maximum} nodes makes no sense", remedy="give 1 <= minimum <= maximum"
        )
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(f"Nodes are listed twice: {', '.join(twice)}", remedy="list each node once")
