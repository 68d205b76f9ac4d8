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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slurm_resilience.errors import Cause

_Event = Mapping[str, Any]
PHASES = ("fault", "detected", "stopped", "requeued", "allocated", "launched", "loaded", "verified", "first_step", "caught_up")
_PHASE_OF_EVENT = {
    "requeue_done": "requeued",
    "allocation_started": "allocated",
    "ranks_launched": "launched",
    "resumed": "loaded",
    "started_fresh": "loaded",
}
_SILENT_END = "its supervisor ended without a word"


@dataclass
class Incident:
    """One pass through the loop.  ``t`` is the wall-clock time of the fault; ``step`` the step that was reached by then.

    ``resumed_step`` is where training went on, None where it started afresh or did not go on.  ``recovered``: a step was
    completed again.  ``attempt`` and ``restart`` are those that the fault ended.
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
    phases: dict[str, float] = field(default_factory=lambda: {"fault": 0.0})

    @property
    def seconds(self) -> float | None:
        """From the fault to the first step; None while there is none."""
        return self.phases.get("first_step")

    @property
    def steps_lost(self) -> int | None:
        """Steps that had to be done again."""
        if self.step is None or self.step < 0 or not self.recovered:
            return None
        return max(0, self.step - (self.resumed_step or 0))

    def as_dict(self) -> dict[str, Any]:
        """JSON values, phases in their order."""
        phases = {name: self.phases[name] for name in PHASES if name in self.phases}
        return {**asdict(self), "phases": phases, "seconds": self.seconds, "steps_lost": self.steps_lost}


class Incidents:
    """The incidents of a run, kept up to date event by event."""

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self._open: Incident | None = None
        self._warning: Incident | None = None
        self._catching_up: list[Incident] = []
        self._step = -1
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
        elif name in ("allocation_started", "supervisor_restarted") and self._running and self._open is None:
            lost = Incident(str(Cause.UNKNOWN), self._last_t, event["attempt"], event["restart"], detail=_SILENT_END)
            lost.step = self._step if self._step >= 0 else None
            self._begin(lost, t)
        elif name == "attempt_adopted" and self._open is not None and self._open.detail == _SILENT_END:
            self.all.remove(self._open)
            self._open = None
        elif name == "first_step":
            recovered = self._first_step(event, t)
        if name in _PHASE_OF_EVENT and self._open is not None:
            verify_s = float(event.get("verify_s") or 0.0)
            self._mark(self._open, _PHASE_OF_EVENT[name], t - verify_s)
            if name == "resumed":
                self._open.resumed_step = event.get("step")
                if verify_s:
                    self._mark(self._open, "verified", t)
        if name in ("ranks_launched", "attempt_adopted"):
            self._running = True
        elif name in ("attempt_stopped", "run_completed", "run_failed"):
            self._running = False
        if name in ("run_completed", "run_failed"):
            self._open = self._warning = None
        self._last_t = max(self._last_t, t)
        return recovered

    def _fault_detected(self, event: _Event, t: float) -> None:
        since = float(event.get("since", t))
        found = Incident(
            event["cause"], since, event["attempt"], event["restart"],
            event.get("node"), event.get("rank"), event.get("detail", ""), self._step if self._step >= 0 else None,
        )  # fmt: skip
        self._begin(found, t)

    def _warning_received(self, event: _Event, t: float) -> None:
        if self._warning is None:
            step = self._step if self._step >= 0 else None
            cause = str(Cause.UNKNOWN)
            self._warning = Incident(cause, t, event["attempt"], event["restart"], detail=str(event["signal"]), step=step)
            self._mark(self._warning, "detected", t)

    def _warning_explained(self, event: _Event, t: float) -> None:
        for incident in (self._warning, self._open if self._open in self.all and self._warning is None else None):
            if incident is not None and incident.cause == str(Cause.UNKNOWN):
                incident.cause, incident.detail = event["cause"], event.get("detail", "")

    def _attempt_stopped(self, event: _Event, t: float) -> None:
        if self._open is None and self._warning is not None and not event.get("fault"):
            self._warning.step = self._step if self._step >= 0 else None
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
        step = event.get("step")
        if not isinstance(step, int) or event["event"] in ("resumed", "checkpoint_started", "run_completed"):
            return
        for incident in [each for each in self._catching_up if each.step is None or step >= each.step]:
            self._mark(incident, "caught_up", t)
            self._catching_up.remove(incident)
        self._step = step if event["event"] in ("first_step", "step_reported") else max(self._step, step)
