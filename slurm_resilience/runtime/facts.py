"""From what ranks say to events: one line where all ranks say the same, and nothing that a rank has no right to say."""

from __future__ import annotations

import re
from typing import Any

from slurm_resilience.observe.vocabulary import FROM_SUPERVISOR
from slurm_resilience.runtime.messages import Fact

# (event, fields, wall-clock time or None for now)
Note = tuple[str, dict[str, Any], float | None]

# Said by every rank, written once, when the last of them has said it.
_TOGETHER = frozenset({"resumed", "started_fresh", "first_step", "finished", "stopped"})
# Kept for what the rank does next, and written nowhere.
_KEPT = frozenset({"script_ended"})
_ENVELOPE = frozenset({"v", "seq", "t", "restart", "attempt", "event"})
_WORD = re.compile(r"[a-z][a-z0-9_]{0,40}")
_MOST_TRACEBACK_CHARS = 8000


class Facts:
    """What the ranks of one attempt have said so far."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._said: dict[str, dict[int, Fact]] = {}

    def said(self, kind: str) -> bool:
        """Any rank has said this."""
        return kind in self._said

    def count(self, kind: str) -> int:
        """How many ranks have said this."""
        return len(self._said.get(kind, ()))

    def said_by(self, rank: int, kind: str) -> bool:
        """This rank has said this."""
        return rank in self._said.get(kind, ())

    def said_by_all(self, kind: str) -> bool:
        """Every rank has said this."""
        return len(self._said.get(kind, ())) == self._world

    def words(self, kind: str) -> dict[str, Any]:
        """What the lowest rank said under this kind; empty when nobody did."""
        said = self._said.get(kind)
        return said[min(said)].fields if said else {}

    def hear(self, node: str, fact: Fact) -> list[Note]:
        """Note a fact of this attempt; what is to be written because of it."""
        if fact.fact not in _TOGETHER | _KEPT:
            return [quote(node, fact)]
        said = self._said.setdefault(fact.fact, {})
        complete = len(said) == self._world
        said[fact.rank] = fact
        if fact.fact in _KEPT or complete or len(said) < self._world:
            return []
        fields = _clean(said[min(said)].fields)
        seconds = [each.fields.get("seconds") for each in said.values()]
        numbers = [value for value in seconds if isinstance(value, int | float)]
        if numbers:
            fields["seconds"] = max(numbers)
        return [(fact.fact, {**fields, "ranks": len(said)}, max(each.t for each in said.values()))]


def quote(node: str, fact: Fact) -> Note:
    """The event of a single rank's fact."""
    fields = {"node": node, "rank": fact.rank, **_clean(fact.fields)}
    # a rank that uses the supervisor's words is quoted, not believed
    if fact.fact in FROM_SUPERVISOR or not _WORD.fullmatch(fact.fact):
        return "fact_received", {**fields, "kind": fact.fact[:80]}, fact.t
    return fact.fact, fields, fact.t


def _clean(fields: dict[str, Any]) -> dict[str, Any]:
    """Without names that belong to the envelope, and with a traceback of bounded length (its end says most)."""
    out = {f"its_{key}" if key in _ENVELOPE or key in ("node", "rank") else key: value for key, value in fields.items()}
    if isinstance(out.get("traceback"), str):
        out["traceback"] = out["traceback"][-_MOST_TRACEBACK_CHARS:]
    return out
