"""Give the job back to Slurm so that it runs again in seconds, on the nodes that we want: the requeue recipe.

Run by the ending supervisor as the job's own user, once every agent is gone:

    hold → requeuehold → NumNodes, ExcNodeList, … → StartTime=now+N → release → exit before N seconds are over

*hold* first: it works on a running job and on one that the controller has requeued already, and it is refused for one
that is over.  That is the controller's own word, at that instant, on whether the job was cancelled; ``requeuehold``
does not ask and brings a cancelled job back to life.

*N* decides how long the job waits: see :mod:`slurm_resilience.slurm.begin`.

Every call is bounded and may be repeated.  Between hold and release the job carries a mark in its comment, so that
whoever looks next (:mod:`slurm_resilience.slurm.waiting`) can free it if we die in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.runtime.reshape import reshape
from slurm_resilience.slurm.begin import QUICK_S, begin_in_s
from slurm_resilience.slurm.cause import Judgement, judge
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.failures import JobFinished, JobNotPending, NoSuchJob, RequeueDisabled
from slurm_resilience.slurm.mark import Marks
from slurm_resilience.slurm.nodeset import fold
from slurm_resilience.slurm.patient import Patient, Step
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState

# Causes after which a job that Slurm counts as over may be queued again.  Never CANCELLED, never UNKNOWN.
_MAY_RETURN = frozenset({Cause.TIME_LIMIT, Cause.PREEMPTION, Cause.NODE_LOST})
_TRIES = 3
# Slurm's word for a job after `scontrol requeuehold`: ours carries our mark, one without is somebody's wish.
_REQUEUED_HELD = "job_requeued_in_held_state"
# A hold with somebody else's mark; an older one is an orphan.
_IN_WORK_S = 120.0
# A begin time that only has to hold until the real one is set.
_LONG_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of a requeue.

    ``requeued``: the job is in the queue and released; leave before ``start_at``.  ``refused``: it must not come back, or
    cannot.  ``failed``: Slurm did not let us; ``held`` then says whether it is left in hold, with our mark, for
    whoever looks next.  (A job that was held while it ran is requeued and stays held: that is somebody's wish.)
    ``nodes`` and ``excluded`` are what was asked for in the end.
    """

    action: Literal["requeued", "refused", "failed"]
    reason: str
    held: bool = False
    start_at: float | None = None
    nodes: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def ok(self) -> bool:
        return self.action == "requeued"

    def as_fields(self) -> dict[str, Any]:
        """Plain values for an event."""
        return {
            "action": self.action,
            "reason": self.reason,
            "held": self.held,
            "start_at": self.start_at,
            "asked_nodes": list(self.nodes) if self.nodes else None,
            "excluded": list(self.excluded),
            "steps": [[step.call, step.result, round(step.seconds, 3)] for step in self.steps],
        }


def requeue(
    client: SlurmClient,
    job_id: str,
    *,
    restart_count: int,
    nodes: tuple[int, int] | None = None,
    exclude: Iterable[str] = (),
    dead: Iterable[str] = (),
    start_in_s: float | None = None,
    marker: str = "",
    patience_s: float = 30.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Outcome:
    """Put run ``restart_count`` of the job back into the queue, for ``nodes`` = (fewest, most) nodes without ``exclude``.

    Only for a caller that has asked for the cause and decided; a cancelled job is refused here once more.  ``exclude`` is in
    order of suspicion; unknown names, and those without which too few nodes would be left, are dropped; what the user
    or the admin excluded stays.  ``dead`` nodes are taken out of the running job first, since a job that holds one hangs
    in COMPLETING for minutes.  ``start_in_s``: how long from now until every process of the job is surely gone and Slurm's
    epilogs are through; left out, it is chosen by what that took before, or by what the site runs there.  ``patience_s``:
    how long a controller that does not answer is asked again.  Blocks for that long at most, plus one call for each step.

    Leave at once when it returns "requeued", by ``os._exit``: the begin time may be two seconds away.

    Never raises for Slurm's failures: the outcome says what happened.
    """
    slurm = Patient(client, job_id, until=clock.monotonic() + patience_s, clock=clock)
    return _Recipe(slurm, restart_count, marker or job_id).run(
        nodes=nodes, exclude=tuple(dict.fromkeys(exclude)), dead=frozenset(dead), start_in_s=start_in_s
    )


@dataclass
class _Recipe:
    slurm: Patient
    restart_count: int
    marker: str
    holding: bool = False
    marks: Marks = field(default_factory=lambda: Marks(""))

    def __post_init__(self) -> None:
        self.client, self.job_id, self.clock = self.slurm.client, self.slurm.job_id, self.slurm.clock

    def run(
        self, *, nodes: tuple[int, int] | None, exclude: tuple[str, ...], dead: frozenset[str], start_in_s: float | None
    ) -> Outcome:
        wait_until = 0.0
        try:
            record = self.slurm.must("show job", lambda: self.client.job(self.job_id))
            said = self._judge(record)
            detail, refusal = said.detail, self._refusal(record, said.cause, said.detail)
            if refusal:
                return self._end("refused", refusal)
            self._shrink(record, dead)
            if start_in_s is None:
                settings = self.slurm.attempt("show config", self.client.config) or {}
                runs = self.slurm.attempt("sacct", lambda: self.client.history(self.job_id)) or []
                start_in_s = begin_in_s(settings, runs)
            wait_until = self._align() if start_in_s <= QUICK_S else 0.0
            self.marks = Marks.read(record.comment)
            somebody = self._held_by_somebody(record)
            if not somebody:
                self.slurm.wish("mark", Comment=str(self.marks.held_by(self.marker, self.clock.time())))
            self._into_the_queue(record)
        except NoSuchJob as error:
            return self._give_up("refused", f"Slurm does not know the job any more ({error.evidence})")
        except JobFinished as error:
            return self._give_up("refused", f"the job was cancelled or is over ({error.evidence})")
        except SlurmError as error:
            return self._give_up("failed", str(error))
        asked, excluded, self.marks = reshape(self.slurm, self.marks, nodes, exclude)
        start_at = self._start_in(_LONG_S if wait_until else start_in_s)
        if somebody:
            self.slurm.wish("unmark", Comment=str(self.marks))
            return self._end("requeued", f"{detail}; {somebody}", held=True, nodes=asked, excluded=excluded)
        if not self._release():
            return self._end("failed", "the job is back in the queue but still held", held=True, nodes=asked, excluded=excluded)
        self.slurm.wish("unmark", Comment=str(self.marks.let_go()))
        if wait_until:
            self._sleep_until(wait_until)
            start_at = self._start_in(start_in_s)
        return self._end("requeued", detail, start_at=start_at, nodes=asked, excluded=excluded)

    def _held_by_somebody(self, record: JobRecord) -> str:
        """Who held the job before us, so that it is to stay so; "" for nobody.  Another requeue, by hand, may be in work."""
        if self.marks.held_at is not None and self.marks.holder != Marks("").held_by(self.marker, 0.0).holder:
            age = self.clock.time() - self.marks.held_at
            return (
                f"another requeue of it is in work ({self.marks.holder})" if record.priority == 0 and age < _IN_WORK_S else ""
            )
        held = record.reason.startswith("JobHeld") or record.reason == _REQUEUED_HELD
        return "somebody had held it before" if held and self.marks.held_at is None else ""

    def _refusal(self, record: JobRecord, cause: Cause, detail: str) -> str:
        """Why this run may not put the job back into the queue; "" when it may."""
        if cause is Cause.CANCELLED:
            return f"the job was cancelled and stays so ({detail})"
        if record.restarts > self.restart_count + 1 or (record.restarts > self.restart_count and not record.requeued):
            return f"a newer run of the job has begun already ({detail}); this one is a leftover"
        if record.state.ended and cause not in _MAY_RETURN:
            return f"the job is over ({detail})"
        return ""

    # -- the stations ---------------------------------------------------------------------------------------------

    def _shrink(self, record: JobRecord, dead: frozenset[str]) -> None:
        """Take dead nodes out of the running job.  Slurm cannot take out the batch host, and never grows a job back."""
        left = [name for name in record.nodes if name not in dead]
        if not record.state.running or len(left) == len(record.nodes) or not left or record.batch_host in dead:
            return
        self.slurm.wish("shrink", NodeList=fold(left))

    def _into_the_queue(self, record: JobRecord) -> None:
        """Into the queue and held there.  Raises JobFinished when the job must not return."""
        if not record.requeue:
            self.slurm.must("allow requeue", lambda: self.slurm.update(Requeue="1"))
        try:
            self.slurm.must("hold", lambda: self.client.hold(self.job_id))
            self.holding = True
        except JobFinished:  # since we looked, or at its time limit: only a new look can tell
            record = self.slurm.must("show job", lambda: self.client.job(self.job_id))
            if self._judge(record).cause not in _MAY_RETURN or record.state.running:
                raise
        except JobNotPending:  # a release of Slurm that holds only pending jobs: ours is running, so it was not cancelled
            pass
        try:
            self.slurm.must("requeuehold", lambda: self.client.requeuehold(self.job_id))
        except RequeueDisabled:  # somebody has set Requeue=0 since we looked
            self.slurm.must("allow requeue", lambda: self.slurm.update(Requeue="1"))
            self.slurm.must("requeuehold", lambda: self.client.requeuehold(self.job_id))
        self.holding = True

    def _start_in(self, start_in_s: float) -> float | None:
        """A begin time in the near future, and proof that Slurm took it."""
        for _ in range(_TRIES):
            set_at = self.clock.time()
            self.slurm.wish("StartTime", StartTime=f"now+{start_in_s:.0f}")
            record = self.slurm.look()
            if record is not None and record.eligible_at is not None and abs(record.eligible_at - set_at - start_in_s) <= 3.0:
                return record.eligible_at
        return None

    def _align(self) -> float:
        """Wait for the end of a wall-clock second, and return when to set the begin time: at the start of the one after next.

        Slurm's begin times are whole seconds.  Set at the start of one, "now+2" leaves the job all of two seconds to complete.
        The controller's background loop runs once a second, so the first pass of the scheduler is over by then.
        """
        now = self.clock.time()
        first = math.floor(now) + 0.93
        if now % 1.0 < 0.93:
            self._sleep_until(first)
        return math.floor(first) + 2.02

    def _sleep_until(self, at: float) -> None:
        time.sleep(max(0.0, min(2.5, at - self.clock.time())))

    def _release(self) -> bool:
        for _ in range(_TRIES):
            self.slurm.attempt("release", lambda: self.client.release(self.job_id))
            record = self.slurm.look()
            if record is not None and record.priority != 0:
                return True
        return False

    def _judge(self, record: JobRecord) -> Judgement:
        # only there does PreemptMode tell a preemption from a cancel
        asks = record.state is JobState.COMPLETING and record.preempt_at is not None
        preemption = self.slurm.preemption(record) if asks else None
        return judge(record, self.restart_count, now=self.clock.time(), preemption=preemption)

    def _give_up(self, action: Literal["refused", "failed"], reason: str) -> Outcome:
        """Leave the job as it was: not held by us, not marked."""
        held = self.holding and not self._release()
        if not held:
            record = self.slurm.look()
            marks = Marks.read(record.comment) if record is not None else Marks("")
            if marks.held_at is not None:
                self.slurm.wish("unmark", Comment=str(marks.let_go()))
        return self._end(action, reason, held=held)

    def _end(self, action: Literal["requeued", "refused", "failed"], reason: str, **more: Any) -> Outcome:
        return Outcome(action, reason, steps=tuple(self.slurm.steps), **more)
