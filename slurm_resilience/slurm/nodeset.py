"""Which nodes does a Slurm node list name, and how is a set of nodes written?

Nobody else in the package takes a node list apart: brackets, padding and nested ranges are ClusterShell's job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_resilience.errors import SlurmError

_NONE = frozenset({"", "(null)", "None", "None assigned", "N/A"})
# Far more than any cluster has, and still read in a second.
_MOST_NODES = 1 << 20
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)-(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """The names in ``text`` (``"n[1-3],gpu07"``), in the order in which Slurm lists them, each once.

    Slurm's words for "no nodes" give an empty tuple.  Raises :class:`SlurmError` for what is no node list.
    """
    text = text.strip()
    if text in _NONE:
        return ()
    names: dict[str, None] = {}
    for piece in _pieces(text):
        for name in _node_set(piece):
            names[str(name)] = None
    return tuple(names)


def fold(names: Iterable[str]) -> str:
    """The shortest way to write a set of nodes; "" for none."""
    unique = list(dict.fromkeys(names))
    return str(_node_set(",".join(unique))) if unique else ""


def _node_set(text: str) -> Iterable[object]:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetParseError

    if any(mark in text for mark in "@*?!&^~ \t\n"):  # ClusterShell's groups and operators mean nothing to Slurm
        raise SlurmError(f"{text!r} is not a node list", evidence="it holds a character that no node name has")
    if _most_in(text) > _MOST_NODES:
        raise SlurmError(
            f"{text[:200]!r} is not a node list of any cluster", evidence=f"it names more than {_MOST_NODES:,} nodes"
        )
    try:
        nodes: Iterable[object] = NodeSet(text, resolver=RESOLVER_NOGROUP)
    except NodeSetParseError as error:
        raise SlurmError(f"{text!r} is not a node list", evidence=str(error)) from error
    return nodes


def _most_in(text: str) -> float:
    """How many nodes the piece could name, told without naming them: brackets multiply."""
    most = 1.0
    for inside in _BRACKETS.findall(text):
        spans = (float(last) - float(first) + 1 for first, last in _RANGE.findall(inside))
        most *= max(1.0, inside.count(",") + sum(max(0.0, span) for span in spans))
    return most


def _pieces(text: str) -> list[str]:
    """Split at the commas outside of brackets, so that the order of a list like ``b[1-2],a1`` is kept."""
    pieces, start, depth = [], 0, 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:at])
            start = at + 1
    pieces.append(text[start:])
    return [piece for piece in pieces if piece]
