"""Is a rank, or a node, steadily slower than its peers?  Reported with numbers; nobody is killed for it.

Compared is what a step costs each rank by itself (see :mod:`training.own_time`), since steps as a whole take all ranks of a
synchronous training the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from slurm_resilience.runtime.facts import Note

LOOK_EVERY_S = 5.0
_STEPS = 20  # that have to be measured
_TIMES = 1.5  # slower than the middle of the others
_AT_LEAST_S = 0.01
_LOOKS = 3  # in a row, before it is steady


class Stragglers:
    """Remembers who was slow at the last looks."""

    def __init__(self, node_of: Mapping[int, str]) -> None:
        self._node_of = node_of
        self._ranks_of: dict[str, list[int]] = {}
        for rank, node in node_of.items():
            self._ranks_of.setdefault(node, []).append(rank)
        self._slow: dict[int, int] = {}
        self._told: set[int] = set()
        self._looked_at = float("-inf")
        self._counts: dict[int, int] = {}

    def look(self, own: Mapping[int, tuple[float, int]], now: float) -> list[Note]:
        """``own``: rank -> seconds a step, over how many steps.  What is to be written because of it."""
        if now - self._looked_at < LOOK_EVERY_S:
            return []
        self._looked_at = now
        known = {rank: seconds for rank, (seconds, count) in own.items() if count >= _STEPS}
        fresh = {rank for rank in known if own[rank][1] > self._counts.get(rank, 0)}
        self._counts = {rank: count for rank, (_, count) in own.items()}
        notes: list[Note] = []
        ordered = sorted(known.values())
        for rank in sorted(fresh) if len(known) > 1 else ():
            middle = middle_without(ordered, known[rank])
            slow = known[rank] > _TIMES * middle and known[rank] - middle > _AT_LEAST_S
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] >= _LOOKS and rank not in self._told:
                self._told.add(rank)
                notes.append(("straggler_found", self._numbers(rank, known, middle), None))
            elif not slow and rank in self._told:
                self._told.discard(rank)
                notes.append(("straggler_recovered", self._numbers(rank, known, middle), None))
        return notes

    def _numbers(self, rank: int, known: Mapping[int, float], middle: float) -> dict[str, object]:
        node = self._node_of[rank]
        mates = [other for other in self._ranks_of[node] if other in known]
        all_slow = len(mates) > 1 and all(self._slow.get(other, 0) >= 1 for other in mates)
        return {
            "node": node, "rank": rank, "own_s": round(known[rank], 4), "others_s": round(middle, 4),
            "times": round(known[rank] / max(middle, 1e-9), 2), "whole_node": all_slow or None,
        }  # fmt: skip


def middle_without(ordered: Sequence[float], value: float) -> float:
    """The median of all others; ``value`` is one of the (at least two) sorted ones.  Costs the same for thousands."""
    place, count = bisect_left(ordered, value), len(ordered) - 1

    def other(index: int) -> float:
        return ordered[index if index < place else index + 1]

    return (other((count - 1) // 2) + other(count // 2)) / 2
