"""Where warnings are heard and explained: one alarm at a time, Slurm asked until it names a cause, until when there is time.

It orders nothing: the coordinator looks at :attr:`must_end`, :attr:`until` and :meth:`verdict`, and acts.
"""

from __future__ import annotations

from slurm_resilience.errors import Cause
from slurm_resilience.runtime.alarm import ASK_EVERY_S, Alarm, local_verdict
from slurm_resilience.runtime.inputs import AskSlurm
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.spec import RunSpec
from slurm_resilience.slurm.cause import MAINTENANCE_LEAD_S, Verdict
from slurm_resilience.slurm.states import JobState

_WATCH_EVERY_S = 30.0
_LAST_CALL_S = 5.0
# An end that has come near is asked for this often until Slurm confirms it.
_NEAR_EVERY_S = 5.0
# From the last save to the last process: agents end, the recipe is run.
_MARGIN_S = 4.0


class WarningDesk:
    """``grace_s``: the most that ranks may take to save and end, whatever Slurm would allow."""

    def __init__(self, outbox: Outbox, spec: RunSpec, *, grace_s: float) -> None:
        self._outbox, self._spec, self._grace_s = outbox, spec, grace_s
        self.alarm: Alarm | None = None
        self._asked = 0  # questions so far
        self._open: int | None = None  # the one that is not answered yet
        self._answered = 0  # the last one that was
        self._needed = 0  # answers to earlier ones are not conclusive
        self._watched_at = outbox.now
        self._ends_at: float | None = None
        self.maintenance_at: float | None = None

    @property
    def must_end(self) -> bool:
        return self.alarm is not None and self.alarm.must_end

    @property
    def until(self) -> float | None:
        """Wall-clock time by which all ranks must have ended; None without an alarm."""
        return self.alarm.until if self.alarm is not None else None

    @property
    def cause(self) -> Cause:
        return self.alarm.cause if self.alarm is not None else Cause.UNKNOWN

    @property
    def why(self) -> dict[str, str | None]:
        """The fields of an event that say why."""
        said = self.alarm.verdict if self.alarm is not None else None
        return {"cause": str(self.cause), "by_hand": said.by_hand or None if said is not None else None}

    def hear(self, signal: str, t: float, source: str) -> None:
        """A signal came, to an agent or to ourselves."""
        if self._spec.script_requeues and self._spec.lead_s > 0 and signal == "SIGUSR2":
            signal = "none"  # --signal's own, and nobody can be asked whether it is: the end is near
        if self.alarm is None:
            grace = self._grace_s
            if self._spec.has_slurm:
                grace = max(1.0, min(grace, self._spec.kill_wait_s - _MARGIN_S))
            self.alarm = Alarm(signal, heard_at=t, now=self._outbox.now, until=t + grace)
            self._outbox.note("warning_received", {"signal": signal, "source": source, "deadline": round(t + grace, 3)}, t=t)
            self.ask()
        elif self.alarm.again(signal, self._outbox.now):
            self._outbox.note("warning_received", {"signal": signal, "source": source, "again": True}, t=t)
            if self.alarm.urgent:
                self.hurry(self._outbox.wall + _LAST_CALL_S)

    def hurry(self, until: float) -> None:
        """There is less time than was thought."""
        if self.alarm is not None:
            self.alarm.until = min(self.alarm.until, until)

    def failed(self, since: float) -> None:
        """A rank ended badly while all are saving: its peers may wait for it for ever, and get a last moment only."""
        self.hurry(since + _LAST_CALL_S)

    def tick(self) -> None:
        """Ask again while the alarm is unexplained, and look now and then whether the job still runs."""
        now, alarm = self._outbox.now, self.alarm
        unexplained = alarm is not None and not alarm.named and now - alarm.asked_at >= ASK_EVERY_S
        every = _NEAR_EVERY_S if alarm is None and self._near() else _WATCH_EVERY_S
        if unexplained or (self._spec.has_slurm and now - self._watched_at >= every):
            self.ask()

    def _near(self) -> bool:
        """The end of the job is so near that the ranks should save, whether a signal came or not.

        One that is for the batch shell alone (--signal=B:…) is heard by nobody else.  A maintenance sends none at all.
        """
        wall, ends_at, maintenance_at = self._outbox.wall, self._ends_at, self.maintenance_at
        limit = self._spec.lead_s > 0 and ends_at is not None and ends_at - wall <= self._spec.lead_s
        return limit or (maintenance_at is not None and maintenance_at - wall <= MAINTENANCE_LEAD_S)

    def ask(self) -> None:
        """Have Slurm asked, unless a question is still open."""
        now, alarm = self._outbox.now, self.alarm
        self._watched_at = now
        if alarm is not None:
            alarm.asked_at = now
        if self._open is None and (self._spec.has_slurm or alarm is not None):
            self._asked += 1
            self._open = self._asked
            if self._spec.has_slurm:
                self._outbox.put(AskSlurm(alarm.heard_at if alarm is not None else self._outbox.wall))
            elif alarm is not None:
                self.said(local_verdict(alarm.signal, heard_at=alarm.heard_at, grace_s=self._grace_s))

    def ask_afresh(self) -> None:
        """Whatever was said so far may no longer be true: only an answer to a question asked from now on counts."""
        self._needed = self._asked + 1
        self.ask()

    def said(self, verdict: Verdict) -> None:
        """The answer to the open question."""
        self._answered, self._open = self._open or self._answered, None
        record = verdict.record
        if record is not None and self.alarm is None:
            over = record.state is JobState.COMPLETING or record.state.ended or record.state.waiting
            self._ends_at = record.end_at
            near = verdict.cause in (Cause.TIME_LIMIT, Cause.NODE_DRAINED) and self._near()
            if over or near or record.restarts > self._spec.restart:
                self.hear("none", self._outbox.wall, "slurm")
                return
        if self.alarm is not None:
            self._explain(self.alarm, verdict)
        if self._answered < self._needed:
            self.ask()

    def verdict(self) -> Verdict | None:
        """What is to be acted on once everything has stopped; None while asking again may still tell more."""
        alarm = self.alarm
        if alarm is None or self._open is not None:
            return None
        patience_s = 0.0 if self._spec.script_requeues else self._spec.kill_wait_s / 2
        return alarm.verdict if alarm.conclusive(self._outbox.now, patience_s=patience_s) else None

    def wants_checkpoint(self) -> bool:
        """The alarm was a mere wish for a checkpoint; it is over then."""
        if self.alarm is None or not self.alarm.save_only(self._outbox.now):
            return False
        self.alarm = None
        return True

    def _explain(self, alarm: Alarm, verdict: Verdict) -> None:
        if not alarm.explain(verdict, self._outbox.now):
            return
        said = alarm.verdict or verdict
        self._outbox.record(
            "warning_explained",
            **self.why,
            detail=said.detail,
            requeued=said.requeued or None,
            deadline=round(said.deadline.soft_at, 3),
        )
        if said.known and alarm.must_end:
            alarm.until = min(said.deadline.soft_at - _MARGIN_S / 2, alarm.heard_at + self._grace_s)
