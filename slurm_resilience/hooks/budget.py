"""May this node be drained?  A pure answer that every node reaches alike from what Slurm says about all of them.

There is no compare-and-swap in Slurm and no store that root could share, so the order of our own drains is the one that
slurmctld gave them: the second in which it took the drain, then the time and name in it.  A node reads back more than a
second after its own drain was taken, when that order cannot change in front of it any more; whoever stands beyond the
budget takes its own drain back.
"""

from . import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .nodes import Node

GRANTED, SPENT, CORRELATED, FOREIGN, ALREADY, LEAVE, UNKNOWN_NODE = (
    "granted", "spent", "correlated", "foreign", "already", "leave", "unknown_node",
)  # fmt: skip
LAST = (float("inf"), float("inf"), "")

# These are the defaults that `hooks install` writes; see docs/reference/checks/budget.md
DEFAULTS = {
    "max_nodes": 10, "max_percent": 5, "partition_max_percent": 25, "window_s": 86400, "window_max_nodes": 10,
    "correlated_s": 900, "correlated_nodes": 3, "correlated_percent": 3,
}  # fmt: skip


class Decision:
    """What is to be done, and the sentence for it."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        self.why = why

    @property
    def granted(self) -> bool:
        return self.kind == GRANTED


def allowed(total: int, most: float, percent: float) -> int:
    """How many of ``total`` nodes may be out: the smaller of both limits, but one at least, or small clusters get none.

    A limit of 0 means none.
    """
    if most <= 0 or percent <= 0:
        return 0
    return max(1, min(int(most), int(total * percent // 100)))


def order(node: "Node") -> "tuple[float, float, str]":
    """Where a drain of ours stands in the line."""
    return (node.since, node.ours.at if node.ours else 0.0, node.name)


def decide(nodes: "list[Node]", me: str, check: str, limits: "dict[str, float]", now: float) -> Decision:
    """Before the drain: may it be written?  Whoever is out already comes first."""
    mine = [node for node in nodes if node.name == me]
    if len(mine) != 1:
        return Decision(UNKNOWN_NODE, f"Slurm knows {len(mine)} nodes of the name {me!r}")
    if mine[0].untouchable:
        return Decision(LEAVE, "the node is {}".format("+".join(mine[0].untouchable)))
    if mine[0].drained:
        if mine[0].ours:
            return Decision(ALREADY, f"it is drained by us: {mine[0].reason}")
        return Decision(FOREIGN, "it is drained by {}: {}".format(mine[0].user or "somebody", mine[0].reason))
    if mine[0].reason and not mine[0].ours:
        return Decision(FOREIGN, "there is a reason by {}: {}".format(mine[0].user or "somebody", mine[0].reason))
    return _within(nodes, mine[0], check, limits, now, LAST)


def confirm(nodes: "list[Node]", me: str, check: str, limits: "dict[str, float]", now: float) -> Decision:
    """After the drain was written and more than a second has gone by: may it stay?"""
    mine = [node for node in nodes if node.name == me]
    if len(mine) != 1:
        return Decision(UNKNOWN_NODE, f"Slurm knows {len(mine)} nodes of the name {me!r}")
    if not (mine[0].drained and mine[0].ours):
        return Decision(FOREIGN, f"somebody else has changed the node since: {mine[0].state} {mine[0].reason}")
    return _within(nodes, mine[0], check, limits, now, order(mine[0]))


def _within(
    nodes: "list[Node]", me: "Node", check: str, limits: "dict[str, float]", now: float, place: "tuple[float, float, str]"
) -> Decision:
    others = [node for node in nodes if node.name != me.name]
    ahead = [node for node in others if node.out and not (node.ours and node.drained and order(node) > place)]
    alike = _alike(others, check, now - limits["correlated_s"], ahead)
    suspicious = max(limits["correlated_nodes"], len(nodes) * limits["correlated_percent"] / 100.0)
    if len(alike) + 1 >= suspicious:
        names = ",".join(sorted(alike)[:5])
        why = f"{check} fails on {len(alike) + 1} nodes at once ({names}): suspect the check or the fabric"
        return Decision(CORRELATED, why)
    most = allowed(len(nodes), limits["max_nodes"], limits["max_percent"])
    if len(ahead) + 1 > most:
        return Decision(SPENT, f"{len(ahead)} of {len(nodes)} nodes are out, {most} may be")
    for partition in me.partitions:
        members = [node for node in nodes if partition in node.partitions]
        missing = [node for node in ahead if partition in node.partitions]
        most = allowed(len(members), len(members), limits["partition_max_percent"])
        if len(missing) + 1 > most:
            why = f"{len(missing)} of {len(members)} nodes of partition {partition} are out, {most} may be"
            return Decision(SPENT, why)
    since = now - limits["window_s"]
    recent = {node.name for node in ahead if node.ours and node.since >= since}
    recent |= {node.name for node in nodes if any(note.kind == "back" and note.at >= since for note in node.notes)}
    if len(recent - {me.name}) + 1 > limits["window_max_nodes"]:
        return Decision(SPENT, "{} nodes were drained within {:g} s, {:g} may be".format(
            len(recent - {me.name}), limits["window_s"], limits["window_max_nodes"]))  # fmt: skip
    return Decision(GRANTED, f"{len(ahead)} of {len(nodes)} nodes are out")


def _alike(others: "list[Node]", check: str, since: float, ahead: "list[Node]") -> "set[str]":
    """Other nodes on which the same check failed lately: drained by it ahead of us, or flagged for it."""
    known_as = reasons.RENAMED.get(check, check)
    drained = {
        node.name for node in ahead if node.ours and node.drained and node.ours.check == known_as and node.since >= since
    }
    flagged = {
        node.name
        for node in others
        if any(note.kind == "flag" and note.what == check and note.at >= since for note in node.notes)
    }
    return drained | flagged
