"""What is every rank doing now?  ``live.json``, for people who look; nothing is decided by it, and losing it loses nothing."""

from __future__ import annotations

from typing import Any

from slurm_resilience.progress.page import Phase
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.inputs import WriteLive
from slurm_resilience.runtime.outbox import Outbox

_EVERY_S = 2.0
# With thousands of ranks the document is large, and one that is a few seconds old is as good.
_RANKS_PER_S = 1000


class LiveView:
    """Has the view written now and then."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._written_at = float("-inf")

    def tick(self, attempt: Attempt | None) -> None:
        """Write it, if there is something to see and the last one is old."""
        if attempt is None or self._out.now - self._written_at < max(_EVERY_S, attempt.world / _RANKS_PER_S):
            return
        nodes = view(attempt, self._out.now)
        if nodes:
            self._written_at = self._out.now
            self._out.put(WriteLive({"v": 1, "t": round(self._out.wall, 3), "attempt": attempt.number, "nodes": nodes}))


def view(attempt: Attempt, now: float) -> dict[str, list[dict[str, Any]]]:
    """Node → its ranks: completed steps, phase, seconds since the last sign of life."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for rank, (progress, at) in sorted(attempt.progress.items()):
        phase = Phase(progress.phase).name.lower() if progress.phase in Phase._value2member_map_ else str(progress.phase)
        seen = {"rank": rank, "step": progress.step, "phase": phase, "age_s": round(progress.age_s + now - at, 2)}
        nodes.setdefault(attempt.node_of[rank], []).append(seen)
    return nodes
