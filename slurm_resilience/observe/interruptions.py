"""What stopped training, and what each kind of stop cost: failures, moves that were meant, and the end that somebody made."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resilience.errors import Cause
from slurm_resilience.observe.failures import Failure, Trace, is_fault
from slurm_resilience.observe.incidents import Incident

_CAUSES = frozenset(cause.value for cause in Cause)


@dataclass
class Interruption:
    """One stretch without training, by the wall clock; ``up_at`` and ``start_s``, from the last allocation, once it is up."""

    at: float
    cause: str
    node: str
    attempt: int
    noticed_at: float
    requeued: bool = False
    queued_s: float = 0.0
    lost_s: float = 0.0
    up_at: float | None = None
    start_s: float | None = None


def sorted_out(
    stops: Sequence[Interruption], incidents: Iterable[Incident], start: float, end: float
) -> tuple[Trace, dict[str, Any]]:
    """The trace that begins at ``start``, and what each kind of stop cost, by the names of ``Measured``.

    An incident of the same attempt names the cause; a stop that is none was meant (to grow, for instance).
    """
    by_attempt = {incident.attempt: incident for incident in incidents if not incident.went_on}
    failures, moves, ending = [], [], None
    seen: dict[str, list[float]] = {}
    for stop in stops:
        incident = by_attempt.get(stop.attempt)
        cause = incident.cause if incident is not None else stop.cause
        node = (incident.node or "") if incident is not None else stop.node
        one = Failure(stop.at - start, cause, node, stop.lost_s, stop.requeued, stop.up_at is not None)
        is_failure = incident.fault if incident is not None else cause in _CAUSES and is_fault(cause)
        if is_failure:
            failures.append(one)
        elif one.back:
            moves.append(one)
        else:
            ending = one
        for name, seconds in _costs(stop, cause, meant=not is_failure).items():
            seen.setdefault(name, []).append(seconds)
    means: dict[str, Any] = {name: statistics.fmean(values) for name, values in seen.items()}
    detect = {name.partition(":")[2]: means.pop(name) for name in list(means) if name.startswith("detect:")}
    return Trace(tuple(failures), end - start, tuple(moves), ending), {**means, "detect_s": detect}


def _costs(stop: Interruption, cause: str, *, meant: bool) -> dict[str, float]:
    if stop.up_at is None:
        return {}
    down_s = stop.up_at - stop.at
    if stop.requeued:
        start_s = stop.start_s or 0.0
        return {"leave_s": down_s - stop.queued_s - start_s, "queue_s": stop.queued_s, "start_s": start_s}
    if meant:
        return {"move_s": down_s}
    noticed_at = min(stop.noticed_at, stop.up_at)
    return {f"detect:{cause}": noticed_at - stop.at, "relaunch_s": stop.up_at - noticed_at}
