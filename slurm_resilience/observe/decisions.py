"""What does a decision's reason say about single nodes?  The sentence is the record: its parts are set apart by semicolons."""

from __future__ import annotations


def about_node(reason: str, node: str) -> str:
    """The parts that begin with this node's name, "" where none does."""
    if node.isdecimal():  # how many nodes there are is no node's name
        return ""
    return "; ".join(part for part in _parts(reason) if part.split(" ", 1)[0].rstrip(",") == node)


def left_out(reason: str) -> dict[str, str]:
    """Node → why a launch does without it, as far as the reason names any."""
    found = {}
    for part in _parts(reason):
        node, left, why = part.partition(" is left out: ")
        if left and " " not in node:
            found[node] = f"left out: {why}"
    return found


def _parts(reason: str) -> list[str]:
    return [part.strip() for part in reason.split(";")]
