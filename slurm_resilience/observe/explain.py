"""What happened in each incident of a run, why, what was decided and how it went on: from its records alone.

Events say when and what was done; the record that the supervisor wrote for the attempt that ended (``incidents/NNNN.json``) has
what was seen before the traces were gone.  A run without such records is explained from its events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.observe.events import read_events
from slurm_resilience.observe.failures import MOVED_BY_HAND, SUPERVISOR_LOST
from slurm_resilience.observe.incidents import Incident, Incidents

_Event = Mapping[str, Any]
VERSION = 1
MEANS = {
    "rank_crash": "a rank died",
    "hang": "a rank made no progress any more",
    "node_lost": "a node was lost",
    "node_drained": "a node was drained under the job",
    "launch_failed": "the ranks could not be started",
    "oom": "a rank ran out of memory",
    "app_error": "the training code failed, and would fail again",
    "bad_checkpoint": "a checkpoint could not be used",
    "config_error": "what was asked for cannot work",
    "preemption": "Slurm took the nodes for another job",
    "time_limit": "the job's time was nearly over",
    "cancelled": "somebody ended the job",
    MOVED_BY_HAND: "somebody put the job back into the queue",
    SUPERVISOR_LOST: "the supervisor died and was started again",
    "unknown": "an end that nobody explained",
}
# What follows an incident and belongs to it, until the next one.
_NEXT = frozenset(
    {
        "decided", "attempt_started", "attempt_adopted", "resumed", "started_fresh", "first_step", "requeue_started",
        "requeue_done", "requeue_failed", "allocation_started", "supervisor_restarted", "supervisor_took_over", "run_failed",
        "run_completed", "checkpoint_quarantined", "checkpoint_passed_over", "agent_lost", "node_gone", "stop_deadline_passed",
        "warning_explained",
    }
)  # fmt: skip


@dataclass
class Explanation:
    """One incident with all that belongs to it.

    ``record`` is None where there is none that can be read.  ``first`` is the exception that began it, None where none did;
    ``echoes`` are those that followed.  ``taken_up``: when somebody began the run again that had ended by it (wall clock).
    """

    incident: Incident
    followed_by: list[_Event] = field(default_factory=list)
    first: Mapping[str, Any] | None = None
    echoes: list[Mapping[str, Any]] = field(default_factory=list)
    failed_saves: list[Mapping[str, Any]] = field(default_factory=list)
    record: Mapping[str, Any] | None = None
    taken_up: float | None = None

    @property
    def cause(self) -> str:
        """That of the incident, as every view names it."""
        return self.incident.cause

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        found = self.incident.as_dict()
        record = dict(self.record) if self.record else None
        then = [{key: value for key, value in each.items() if key not in ("v", "seq", "plan")} for each in self.followed_by]
        decided = [each for each in then if each["event"] == "decided"]
        return {
            **found, "means": MEANS.get(self.cause, self.cause), "first_exception": self.first,
            "echoes": self.echoes, "failed_saves": self.failed_saves, "decisions": decided,
            "next": [each for each in then if each["event"] != "decided"], "evidence": record, "taken_up": self.taken_up,
        }  # fmt: skip


def explain(run_dir: Path) -> list[Explanation]:
    """All incidents of a run in order.  The events are read twice rather than kept: a long run has a gigabyte of them."""
    found = stories(read_events(run_dir))
    raised: dict[int, list[_Event]] = {}
    failed: dict[int, list[Mapping[str, Any]]] = {}
    for event in read_events(run_dir):
        if event["event"] == "checkpoint_failed":
            failed.setdefault(int(event["attempt"]), []).append({"step": event.get("step"), "error": event.get("error")})
        if event["event"] == "exception":
            raised.setdefault(int(event["attempt"]), []).append(event)
    for each in found:
        if each.cause == SUPERVISOR_LOST:
            continue
        each.record = _record(run_dir, each.incident.attempt)
        each.failed_saves = failed.get(each.incident.attempt, [])
        exceptions = sorted(raised.get(each.incident.attempt, ()), key=lambda event: float(event["t"]))
        # A rank that died without a word raised nothing: what the others raised are the echoes of its end.
        rank, since = each.incident.rank, each.incident.t
        own = [event for event in exceptions if event.get("rank") == rank or (rank is None and float(event["t"]) <= since)]
        each.first = _exception(own[0]) if own else None
        first_of = {event.get("rank"): event for event in reversed(exceptions)}
        told = own[0].get("rank") if own else None
        each.echoes = [_exception(event) for rank, event in reversed(first_of.items()) if not own or rank != told]
    return found


def stories(events: Iterable[_Event]) -> list[Explanation]:
    """The incidents in these events, each with what followed it."""
    fold = Incidents()
    found: list[Explanation] = []
    open_: Explanation | None = None
    for event in events:
        name, count = str(event["event"]), len(fold.all)
        fold.apply(event)
        for incident in fold.all[count:]:
            open_ = Explanation(incident)
            found.append(open_)
        if name == "allocation_started" and open_ is not None and open_.taken_up is None and _ended_run(open_):
            open_.taken_up = float(event["t"])
        if open_ is not None and name in _NEXT and not _is_over(open_):
            open_.followed_by.append(event)
    return found


def _is_over(one: Explanation) -> bool:
    """Training went on, or ended for good: what comes now is no part of it."""
    return any(event["event"] in ("first_step", "attempt_adopted", "run_failed", "run_completed") for event in one.followed_by)


def _ended_run(one: Explanation) -> bool:
    return any(event["event"] == "run_failed" for event in one.followed_by)


def _exception(event: _Event) -> dict[str, Any]:
    names = ("t", "node", "rank", "type", "message", "step", "its_step", "traceback")
    return {name: event[name] for name in names if event.get(name) is not None}


def _record(run_dir: Path, attempt: int) -> dict[str, Any] | None:
    """The record of this attempt's end; one that is torn, or of a newer release, is passed over."""
    try:
        value = json.loads((run_dir / "incidents" / f"{attempt:04d}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("v"), int) or value["v"] > VERSION:
        return None
    return value
