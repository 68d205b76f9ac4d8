"""What went wrong in a run, and how long each part of coming back took: a fold over its events.

An incident runs from a fault to the first step that all ranks completed after it.  Its phases are seconds since the
fault, absent where they do not apply:

    fault      0
    detected   the supervisor knew
    stopped    nothing of the old attempt was alive any more
    requeued   Slurm had the job back in its queue
    allocated  a supervisor began on the new nodes
    launched   every node had started its ranks
    loaded     every rank had its checkpoint
    verified   what was loaded had been checked
    first_step every rank had completed a step
    caught_up  the step was reached at which the fault struck

All that is said of a run's incidents anywhere comes from here: which there are, their causes and numbers, how they ended, and
how many steps had to be done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slurm_resilience.errors import Cause
from slurm_resilience.observe.duration import short
from slurm_resilience.observe.failures import MOVED_BY_HAND, SUPERVISOR_LOST, is_fault, word_of

_Event = Mapping[str, Any]
PHASES = ("fault", "detected", "stopped", "requeued", "allocated", "launched", "loaded", "verified", "first_step", "caught_up")
_PHASE_OF_EVENT = {
    "requeue_done": "requeued",
    "allocation_started": "allocated",
    "ranks_launched": "launched",
    "resumed": "loaded",
    "started_fresh": "loaded",
}
# Steps of other things than what this attempt has done by then.
_TELL_NO_STEP = frozenset({"resumed", "checkpoint_started", "checkpoint_quarantined", "checkpoint_passed_over", "exception",
                           "checkpoint_failed", "first_steps_checked", "run_failed", "run_completed"})  # fmt: skip
_SILENT_END = "its supervisor ended without a word"


@dataclass
class Incident:
    """One pass through the loop.  ``t`` is the wall-clock time of the fault; ``step`` the last one that was reached before it.

    ``resumed_step`` is where training went on, None where it started afresh or did not go on.  ``recovered``: a step was
    completed again, or none was left, or (``went_on``) all ranks had gone on without their supervisor.  ``seen_outside``: the
    ranks run again and tell no steps, as those of a script without a ``Run``.  ``attempt`` and
    ``restart`` are those that the fault ended.
    """

    cause: str
    t: float
    attempt: int
    restart: int
    node: str | None = None
    rank: int | None = None
    detail: str = ""
    step: int | None = None
    resumed_step: int | None = None
    recovered: bool = False
    went_on: bool = False
    seen_outside: bool = False
    phases: dict[str, float] = field(default_factory=lambda: {"fault": 0.0})
    # The attempt whose steps ``step`` counts, and the step before the first one of the attempt that came back.
    _stepped_by: int = -1
    _back_from: int | None = None

    @property
    def fault(self) -> bool:
        """False for what somebody ended, or moved to other nodes, on purpose."""
        return is_fault(self.cause)

    @property
    def seconds(self) -> float | None:
        """From the fault to the first step; None while there is none."""
        return self.phases.get("first_step")

    @property
    def steps_lost(self) -> int | None:
        """Steps that had to be done again: all that any event tells of beyond where training went on; None where unknown."""
        if self.step is None or self.step < 0 or not self.recovered:
            return None
        if self.went_on:
            return 0
        again_from = self.resumed_step if self.resumed_step is not None else self._back_from
        return None if again_from is None else max(0, self.step - again_from)

    def outcome(self, *, open_: bool = False) -> str:
        """How it ended, in a few words; ``open_``: it may still come back."""
        if self.seconds is not None:
            return f"back in {short(self.seconds)}"
        if self.went_on:
            return "all ranks had gone on"
        if not self.fault and self.cause != MOVED_BY_HAND:
            return "ended on purpose"
        if self.recovered:
            return "back, and complete"
        if self.seen_outside:
            return "back, as far as can be seen from outside"
        return "not back yet" if open_ else "did not come back"

    def as_dict(self) -> dict[str, Any]:
        """JSON values, phases in their order."""
        phases = {name: self.phases[name] for name in PHASES if name in self.phases}
        plain = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return {**plain, "phases": phases, "seconds": self.seconds, "steps_lost": self.steps_lost, "fault": self.fault}


def faults(incidents: Iterable[Incident]) -> list[Incident]:
    """Those that went wrong, without what was ended on purpose: what is meant wherever incidents are counted."""
    return [incident for incident in incidents if incident.fault]


def moves(incidents: Iterable[Incident]) -> list[Incident]:
    """Those in which somebody put the job back into the queue."""
    return [incident for incident in incidents if incident.cause == MOVED_BY_HAND]


def numbered(incidents: Iterable[Incident]) -> list[tuple[int | None, Incident]]:
    """Each with the number by which every view names it, from 1; None for what was ended on purpose."""
    out: list[tuple[int | None, Incident]] = []
    count = 0
    for incident in incidents:
        count += incident.fault
        out.append((count if incident.fault else None, incident))
    return out


def steps_done_again(incidents: Iterable[Incident]) -> int:
    """All steps whose results faults took away."""
    return sum(incident.steps_lost or 0 for incident in faults(incidents))


def still_open(incidents: Sequence[Incident], incident: Incident, *, over: bool) -> bool:
    """It may still come back: it is the last one of a run that goes on."""
    return not over and incident is incidents[-1]


class Incidents:
    """The incidents of a run, kept up to date event by event."""

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self._open: Incident | None = None
        self._warning: Incident | None = None
        self._catching_up: list[Incident] = []
        self._step = self._stepped_by = -1
        self._came_back: dict[int, Incident] = {}  # by the attempt that did
        self._last_t = 0.0
        self._running = False

    @classmethod
    def of(cls, events: Iterable[_Event]) -> list[Incident]:
        """All incidents in a run's events."""
        fold = cls()
        for event in events:
            fold.apply(event)
        return fold.all

    def apply(self, event: _Event) -> Incident | None:
        """Take one more event into account; the incident that it ends well, if it does."""
        name, t = str(event["event"]), float(event["t"])
        self._note_step(event, t)
        recovered = None
        if name in ("fault_detected", "warning_received", "warning_explained", "attempt_stopped"):
            getattr(self, f"_{name}")(event, t)
        elif name in ("allocation_started", "supervisor_restarted", "supervisor_took_over"):
            self._supervisor_gone(event, t)
        elif name == "attempt_adopted":
            self._adopted(event)
        elif name == "first_step":
            recovered = self._first_step(event, t)
        elif name == "watched_from_outside" and self._open is not None:  # a first step, if one is told, is the better end
            self._open.seen_outside = True
        self._note_phase(event, t)
        if name in ("ranks_launched", "attempt_adopted"):
            self._running = True
        elif name in ("attempt_stopped", "run_completed", "run_failed"):
            self._running = False
        if name == "run_failed":
            self._run_failed(event, t)
        if name == "run_completed" and self._open is not None:  # it came back where nothing was left to do
            self._open.recovered = True
        if name in ("run_completed", "run_failed"):
            self._open = self._warning = None
        self._last_t = max(self._last_t, t)
        return recovered

    def _supervisor_gone(self, event: _Event, t: float) -> None:
        """Another supervisor begins.  In the same allocation the one before was lost; else nobody knows what ended that."""
        if self._open is not None or event["event"] == "supervisor_took_over" or not self._running:
            return
        if self._warning is not None and event["event"] == "allocation_started":  # the warning says why
            self._warning.step, self._warning._stepped_by = self._step if self._step >= 0 else None, self._stepped_by
            self._begin(self._warning, None)
            self._warning = None
            return
        cause = SUPERVISOR_LOST if event["event"] == "supervisor_restarted" else str(Cause.UNKNOWN)
        self._begin(self._incident(cause, self._last_t, event, detail=_SILENT_END), t)

    def _adopted(self, event: _Event) -> None:
        if self._open is not None and self._open.detail == _SILENT_END:
            self._open.recovered = self._open.went_on = True
            self._open = None

    def _run_failed(self, event: _Event, t: float) -> None:
        """A run that nothing had gone wrong with so far: that end is what there is to tell."""
        if self._open is None and word_of(event) not in ("", "None", str(Cause.UNKNOWN)):
            self._begin(self._incident(word_of(event), t, event, detail=str(event.get("reason", ""))), None)

    def _note_phase(self, event: _Event, t: float) -> None:
        phase, incident = _PHASE_OF_EVENT.get(event["event"]), self._open
        if event["event"] == "resumed":
            incident = incident or self._came_back.get(int(event.get("attempt") or 0))  # it may be told after the first step
            if incident is not None:
                incident.resumed_step = event.get("step")
        if phase is None or incident is None or incident.recovered:
            return
        verify_s = float(event.get("verify_s") or 0.0)
        self._mark(incident, phase, t - verify_s)
        if event["event"] == "resumed" and verify_s:
            self._mark(incident, "verified", t)

    def _incident(self, cause: str, t: float, event: _Event, **more: Any) -> Incident:
        reached = self._step if self._step >= 0 else None
        attempt, restart = int(event.get("attempt") or 0), int(event.get("restart") or 0)
        return Incident(cause, t, attempt, restart, step=reached, _stepped_by=self._stepped_by, **more)

    def _fault_detected(self, event: _Event, t: float) -> None:
        since = float(event.get("since", t))
        where = {"node": event.get("node"), "rank": event.get("rank"), "detail": event.get("detail", "")}
        self._begin(self._incident(str(event.get("cause", Cause.UNKNOWN)), since, event, **where), t)

    def _warning_received(self, event: _Event, t: float) -> None:
        if self._warning is None:
            self._warning = self._incident(str(Cause.UNKNOWN), t, event, detail=str(event.get("signal", "")))
            self._mark(self._warning, "detected", t)

    def _warning_explained(self, event: _Event, t: float) -> None:
        for incident in (self._warning, self._open if self._open in self.all and self._warning is None else None):
            if incident is not None and incident.cause == str(Cause.UNKNOWN):
                incident.cause, incident.detail = word_of(event), event.get("detail", "")

    def _attempt_stopped(self, event: _Event, t: float) -> None:
        if self._open is None and self._warning is not None and not event.get("fault"):
            self._warning.step, self._warning._stepped_by = self._step if self._step >= 0 else None, self._stepped_by
            self._begin(self._warning, None)
            self._warning = None
        if self._open is not None:
            self._mark(self._open, "stopped", t)
            if event.get("fault"):
                self._open.cause, self._open.detail = event["cause"], event.get("detail", self._open.detail)
                self._open.node, self._open.rank = event.get("node"), event.get("rank")

    def _first_step(self, event: _Event, t: float) -> Incident | None:
        self._warning = None
        incident, self._open = self._open, None
        if incident is not None:
            self._mark(incident, "first_step", t)
            incident.recovered = True
            if isinstance(event.get("step"), int):
                incident._back_from = event["step"] - 1
            self._came_back = {int(event.get("attempt") or 0): incident}
            self._catching_up.append(incident)
            self._note_step(event, t)
        return incident

    def _begin(self, incident: Incident, detected_t: float | None) -> None:
        self._open = incident
        self.all.append(incident)
        if detected_t is not None:
            self._mark(incident, "detected", detected_t)

    def _mark(self, incident: Incident, phase: str, t: float) -> None:
        incident.phases.setdefault(phase, round(max(0.0, t - incident.t), 4))

    def _note_step(self, event: _Event, t: float) -> None:
        step, attempt = event.get("step"), int(event.get("attempt") or 0)
        if not isinstance(step, int) or event["event"] in _TELL_NO_STEP:
            return
        # What an attempt did may be told late: its agents keep it while there is no supervisor.
        for incident in reversed(self.all[-2:]):
            if incident._stepped_by == attempt and not incident.went_on and incident.step is not None:
                incident.step = max(incident.step, step)
        if attempt < self._stepped_by:
            return
        for incident in [each for each in self._catching_up if each.step is None or step >= each.step]:
            self._mark(incident, "caught_up", t)
            self._catching_up.remove(incident)
        follows = attempt > self._stepped_by and event["event"] in ("first_step", "step_reported")
        self._step = step if follows else max(self._step, step)
        self._stepped_by = attempt if follows or self._stepped_by < 0 else self._stepped_by
