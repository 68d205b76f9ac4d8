"""When did things fail, and what did each failure cost?  The values that accounts yield and replays take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_resilience.errors import Cause

# The supervisor died while its ranks ran, and another one took its place in the same allocation.  No budget counts it, so it is
# no :class:`Cause`; every view of a run names it so.
SUPERVISOR_LOST = "supervisor_lost"
# Somebody put the job back into the queue.  Nothing went wrong, so it is no :class:`Cause` either: events say "unknown", and in
# ``by_hand`` who or what did it; every view of a run names it so.
MOVED_BY_HAND = "requeued"
_ON_PURPOSE = frozenset({Cause.CANCELLED.value, MOVED_BY_HAND})


def is_fault(cause: str) -> bool:
    """Something went wrong.  What somebody did on purpose, an end or a move to other nodes, is none."""
    return cause not in _ON_PURPOSE


def word_of(event: Mapping[str, Any]) -> str:
    """The cause in an event, as every view names it; "" where it has none."""
    return MOVED_BY_HAND if event.get("by_hand") else str(event.get("cause") or "")


@dataclass(frozen=True)
class Failure:
    """One failure, ``at_s`` seconds after the start of the trace.

    The rest is what the run itself showed of it, where it did: ``lost_s`` seconds of work that had to be done again,
    ``requeued`` whether it went on in another allocation, ``back`` whether it went on at all.
    """

    at_s: float
    cause: str = Cause.NODE_LOST.value
    node: str = ""
    lost_s: float | None = None
    requeued: bool | None = None
    back: bool = True


@dataclass(frozen=True)
class Trace:
    """Failures in order, over ``length_s`` seconds.

    ``moves``: attempts that were ended on purpose and went on, to take nodes in for instance; ``ending``: the end that somebody
    made of the run.  Neither is a failure.
    """

    failures: tuple[Failure, ...]
    length_s: float
    moves: tuple[Failure, ...] = ()
    ending: Failure | None = None
