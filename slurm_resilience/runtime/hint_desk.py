"""Which nodes root should look at more closely, by what the run has seen there; told to the agent of that node itself.

A hint is left on the node that it is about, for root there reads what is there.  A node that is dead is told of when an agent
comes back on it; that root checks a node from top to bottom after a boot needs no hint.
"""

from __future__ import annotations

from slurm_resilience.errors import Cause
from slurm_resilience.runtime.messages import Hint
from slurm_resilience.runtime.outbox import Outbox

# What a node can be to blame for.  An exception of the user's code, a preemption, a time limit say nothing about it.
_OF_NODES = frozenset({Cause.RANK_CRASH, Cause.HANG, Cause.OOM, Cause.NODE_LOST, Cause.LAUNCH_FAILED})


class HintDesk:
    """One hint at most waits for each node: the newest."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._waiting: dict[str, Hint] = {}

    def blame(self, node: str, conn: int | None, cause: Cause, at: float) -> None:
        """Something has ended there that should not have, at this wall-clock time."""
        if not node or cause not in _OF_NODES:
            return
        hint = Hint(self._outbox.attempt, str(cause), at)
        if conn is None:
            self._waiting[node] = hint
        else:
            self._outbox.send(conn, hint)

    def joined(self, node: str, conn: int) -> None:
        """An agent is there (again)."""
        hint = self._waiting.pop(node, None)
        if hint is not None:
            self._outbox.send(conn, hint)
