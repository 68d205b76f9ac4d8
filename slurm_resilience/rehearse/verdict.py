"""What the faults did to the job, and one page about it.  Pure: events in, verdict out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurm_resilience.observe.failures import word_of
from slurm_resilience.observe.incidents import Incident, Incidents
from slurm_resilience.rehearse.wish import FAULTS

_Event = Mapping[str, Any]


@dataclass(frozen=True)
class Blow:
    """One fault as it was dealt: wall-clock time, and what was hit.  ``failed``: why it could not be dealt, or not survived."""

    fault: str
    at: float
    where: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of it.

    ``cause``: what the supervisor took it for.  ``noticed_s`` and ``back_s``: seconds from the fault until it was known, and
    until training went on (``back_by`` says how that is seen).  ``trained_on_s``: a warned job goes on for so long first, and
    ``still_s`` is what is left of ``back_s``.  ``saved_again_s``: a script without a ``Run`` only has its file in place when it
    is called back; so long after that it has saved anew.  ``steps_lost``: steps done again, None where nobody counts them;
    ``work_lost_s``: age of the checkpoint when training ended, that is the work done again at most; ``saved_first``: it
    could save before it stopped, and lost nothing.  ``requeues``: of the job.
    """

    fault: str
    where: str
    ok: bool
    says: str
    cause: str = ""
    noticed_s: float | None = None
    back_s: float | None = None
    back_by: str = ""
    trained_on_s: float | None = None
    still_s: float | None = None
    saved_again_s: float | None = None
    resumed_from: int | None = None
    steps_lost: int | None = None
    work_lost_s: float | None = None
    saved_first: bool = False
    requeues: int = 0
    nodes_after: int | None = None


def outcomes(blows: Sequence[Blow], events: Iterable[_Event]) -> list[Outcome]:
    """One outcome for each blow, in their order."""
    known = list(events)
    ends = [*(blow.at or float("inf") for blow in blows[1:]), float("inf")]
    return [_outcome(blow, known, until) for blow, until in zip(blows, ends, strict=True)]


def _outcome(blow: Blow, events: list[_Event], until: float) -> Outcome:
    if blow.failed and not blow.at:
        return Outcome(blow.fault, blow.where, False, blow.failed)
    after = [event for event in events if blow.at <= event["t"] < until]
    incident = next((one for one in Incidents.of(events) if blow.at - 1.0 <= one.t < until), None)
    resumed, first_step = _first(after, "resumed"), _first(after, "first_step")
    fresh = _first(after, "started_fresh")
    seen = first_step or resumed
    allocated = [event for event in after if event["event"] == "allocation_started"]
    started = _first(after, "attempt_started")
    # a script without a Run has no first step, and so no end of the incident before: then what was heard speaks for itself
    heard, explained = _first(after, "warning_received", "fault_detected"), _first(after, "warning_explained")
    # a clean stop saves first; then nothing is done again
    stop = _first(after, "attempt_stopped")
    clean = bool(stop and stop.get("saved"))
    warned = stop is not None and heard is not None and heard["event"] == "warning_received"
    ended_at = stop["t"] if stop is not None and warned else blow.at
    saved = [event["t"] for event in events if event["event"] == "checkpoint_committed" and event["t"] <= ended_at]
    again = None
    if seen is not None and first_step is None:
        again = _first((event for event in after if event["t"] > seen["t"]), "checkpoint_committed")
    back_by = "first step of all ranks" if first_step else "its checkpoint is in place" if resumed else ""
    about: dict[str, Any] = {
        "cause": incident.cause if incident else word_of(explained or heard or {}),
        "noticed_s": _noticed(incident, heard, blow.at),
        "back_s": _round(seen["t"] - blow.at) if seen and not fresh else None,
        "back_by": back_by,
        "trained_on_s": _round(ended_at - blow.at) if warned else None,
        "still_s": _round(seen["t"] - ended_at) if seen and not fresh else None,
        "saved_again_s": _round(again["t"] - seen["t"]) if again and seen else None,
        "resumed_from": resumed.get("step") if resumed else None,
        "steps_lost": incident.steps_lost if incident else None,
        "saved_first": clean,
        "work_lost_s": 0.0 if clean else _round(ended_at - saved[-1]) if saved else None,
        "requeues": len(allocated),
        "nodes_after": len(started.get("nodes") or []) if started else None,
    }
    if blow.failed:
        return Outcome(blow.fault, blow.where, False, blow.failed, **about)
    if fresh:
        return Outcome(blow.fault, blow.where, False, "it began again from scratch", **about)
    if resumed is None:
        return Outcome(blow.fault, blow.where, False, "it did not go on from a checkpoint", **about)
    return Outcome(blow.fault, blow.where, True, "it went on by itself", **about)


def _first(events: Iterable[_Event], *names: str) -> _Event | None:
    return next((event for event in events if event["event"] in names), None)


def _noticed(incident: Incident | None, heard: _Event | None, at: float) -> float | None:
    if incident is not None:
        return _round(incident.phases.get("detected"))
    return _round(heard["t"] - at) if heard else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def as_dict(found: Sequence[Outcome], about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document."""
    survived = sum(one.ok for one in found)
    return {**about, "faults": len(found), "survived": survived, "ok": survived == len(found),
            "outcomes": [asdict(one) for one in found]}  # fmt: skip


def page(found: Sequence[Outcome], about: Mapping[str, Any]) -> str:
    """The verdict for people, on one page."""
    survived = sum(one.ok for one in found)
    verdict = "it survives all of it" if survived == len(found) else f"it survives {survived} of {len(found)}"
    lines = [f"Rehearsal of {about['script']} on {about['where']}: {verdict}", ""]
    for one in found:
        mark = "ok    " if one.ok else "FAILED"
        where = f" ({one.where})" if one.where else ""
        lines.append(f"{mark} {one.fault}: {FAULTS[one.fault]}{where}")
        lines.append(f"       {one.says}{_times(one)}")
        lines.append(f"       {_cost(one)}")
    lines += ["", f"The run, with its logs and events: {about['run_dir']}"]
    return "\n".join(lines)


def _times(one: Outcome) -> str:
    parts = []
    if one.noticed_s is not None:
        parts.append(f"noticed after {one.noticed_s:.1f} s{f' as {one.cause}' if one.cause else ''}")
    if one.trained_on_s is not None and one.still_s is not None:
        parts.append(f"trained on for {one.trained_on_s:.1f} s, then stood still for {one.still_s:.1f} s (until {one.back_by})")
    elif one.back_s is not None:
        parts.append(f"back after {one.back_s:.1f} s ({one.back_by})")
    if one.saved_again_s is not None:
        parts.append(f"saved anew {one.saved_again_s:.1f} s later")
    return ": " + ", ".join(parts) if parts else ""


def _cost(one: Outcome) -> str:
    if one.saved_first:
        lost = "lost: nothing, it had saved first"
    elif one.steps_lost is not None:
        lost = f"lost: {one.steps_lost} steps, done again"
    elif one.work_lost_s is not None:
        lost = f"lost: up to {one.work_lost_s:.1f} s of work, done again"
    else:
        lost = "lost: unknown, there was no checkpoint"
    queue = "no requeue" if not one.requeues else f"{one.requeues} requeue{'s' if one.requeues > 1 else ''}"
    nodes = f", {one.nodes_after} node{'s' if one.nodes_after != 1 else ''} afterwards" if one.nodes_after else ""
    return f"{lost}; {queue}{nodes}"
