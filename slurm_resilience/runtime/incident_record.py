"""The one record of an incident: what was seen of it before its traces were gone, as JSON values of bounded size.

When it happened, what was decided and how it went on are events; this is what events have no room for.
"""

from __future__ import annotations

from typing import Any

from slurm_resilience.runtime import stacks
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.evidence import Origin

_MOST_ENDS, _MOST_STACKS = 64, 64
_TAIL_LINES = 20


def record_of(attempt: Attempt, origin: Origin, *, wall: float) -> dict[str, Any]:
    """The record of the fault that ended this attempt."""
    ends = sorted(attempt.exits.values(), key=lambda end: (end.rank != origin.rank, end.t, end.rank))
    told = [end for end in ends if end.signal not in ("SIGKILL", "SIGTERM") or end.rank == origin.rank or end.oom]
    groups = stacks.summary(attempt.looks)
    shown = [rank for ranks, _ in groups for rank in ranks[:2]][:_MOST_STACKS]
    if origin.rank in attempt.looks and origin.rank not in shown:
        shown = [origin.rank, *shown]
    return {
        "at": round(wall, 3),
        "origin": {
            "cause": str(origin.cause), "since": origin.since, "node": origin.node, "rank": origin.rank,
            "detail": origin.detail, "signal": origin.signal, "signature": origin.signature, "echo": origin.echo,
        },
        "exceptions": sorted(attempt.exceptions, key=lambda each: float(each["t"])),
        "ends": [
            {
                "rank": end.rank, "node": attempt.node_of[end.rank], "code": end.code, "signal": end.signal, "t": end.t,
                "step": end.step, "oom": end.oom, "tail": end.tail[-_TAIL_LINES:],
            }
            for end in told[:_MOST_ENDS]
        ],
        "ended": len(attempt.exits),
        "world": attempt.world,
        "doing": [{"ranks": ranks, "what": what} for ranks, what in groups],
        "looks": {str(rank): dict(attempt.looks[rank]) for rank in shown},
        "kernel": attempt.kernel,
        "limits": attempt.limits.longest(),
    }  # fmt: skip
