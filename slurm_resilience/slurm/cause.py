"""Why is Slurm ending this run of the job?  Asked of the controller, never guessed from which signals came in which order.

Slurm has changed the order of its signals between releases, and TERM means preemption, time limit, scancel or a hand-made
requeue alike.  What tells them apart is the controller's record at that moment:

    RUNNING,    PreemptTime set                    preempted, in its grace period; EndTime is the deadline
    RUNNING,    EndTime near                       time limit coming (the warning of --signal)
    Restarts    one higher than ours               the controller has requeued already: preemption, lost node or by hand;
                                                   Comment with the mark of `slurm-resilience requeue`: that
    COMPLETING, Restarts unchanged                 Reason=TimeLimit: time limit; PreemptTime set where PreemptMode is
                                                   CANCEL: preempted for good; otherwise somebody cancelled it
    CANCELLED                                      cancelled

A cancelled job must never be requeued: Slurm would, without a word, bring it back to life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.slurm.client import AccountingRecord, SlurmClient
from slurm_resilience.slurm.failures import CommandTimeout, ControllerUnreachable, NoSuchJob
from slurm_resilience.slurm.mark import BY_HAND, Marks
from slurm_resilience.slurm.preemption import ask_preemption
from slurm_resilience.slurm.records import JobRecord, NodeRecord
from slurm_resilience.slurm.reservations import Reservation, next_maintenance
from slurm_resilience.slurm.states import JobState
from slurm_resilience.slurm.timeleft import Deadline, before_maintenance, deadline, grace_s, kill_wait_s

_T = TypeVar("_T")

# A warning of --signal=…@lead may come this much early: the controller looks at time limits every 30 s or so.
SIGNAL_GRAIN_S = 60.0
# So long before a maintenance begins the ranks save and leave.
MAINTENANCE_LEAD_S = 120.0

_OF_STATE = {
    JobState.CANCELLED: Cause.CANCELLED,
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.DEADLINE: Cause.TIME_LIMIT,
    JobState.NODE_FAIL: Cause.NODE_LOST,
    JobState.BOOT_FAIL: Cause.NODE_LOST,
    JobState.PREEMPTED: Cause.PREEMPTION,
    JobState.OUT_OF_MEMORY: Cause.OOM,
    JobState.LAUNCH_FAILED: Cause.LAUNCH_FAILED,
}


def cause_of_state(state: JobState) -> Cause | None:
    """Why a run of a job ended, where Slurm's word for its end says so."""
    return _OF_STATE.get(state)


@dataclass(frozen=True)
class Judgement:
    """What a record shows.  ``detail`` says how we know.

    ``by_hand``: who or what put the job back into the queue, "" where nobody is known to have; then ``cause`` is UNKNOWN, since
    nothing went wrong.
    """

    cause: Cause
    detail: str
    by_hand: str = ""


@dataclass(frozen=True)
class Verdict:
    """Why the job is ending and how long is left.

    ``requeued``: the controller has already put it back into the queue.  ``detail``: how we know, for the event and the log.
    ``known``: False when the controller could not be asked; then ``cause`` is UNKNOWN and the deadline the shortest possible.
    ``waited_s``: how long it took to answer.  After more than a moment it may have been away, and have forgotten.
    ``by_hand``: as in :class:`Judgement`.
    """

    cause: Cause
    requeued: bool
    deadline: Deadline
    detail: str
    known: bool
    record: JobRecord | None
    waited_s: float = 0.0
    by_hand: str = ""

    @property
    def named(self) -> bool:
        """It says why: by a cause, or by whoever requeued the job."""
        return self.cause is not Cause.UNKNOWN or bool(self.by_hand)


def ask_cause(
    client: SlurmClient,
    job_id: str,
    restart_count: int,
    *,
    heard_at: float,
    my_nodes: Collection[str] = (),
    lead_s: float = 0.0,
    patience_s: float = 10.0,
    config: Mapping[str, str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Verdict:
    """Ask Slurm why run ``restart_count`` of the job is ending, given that a warning was heard at ``heard_at`` (wall clock).

    Blocks while Slurm is asked, at most about ``patience_s`` plus one call: keep it out of loops that must not stand still.
    ``my_nodes``: the nodes of this run, to tell a lost node from a preemption; ``lead_s``: that of ``--signal``;
    ``config``: ``client.config()``, when the caller has it from the start.  Never raises for Slurm's own failures.
    """
    asked = clock.monotonic()
    until = asked + patience_s
    settings = dict(config or {})
    while True:
        try:
            record = client.job(job_id)
            waited = clock.monotonic() - asked
            break
        except NoSuchJob as error:
            last = deadline(None, heard_at=heard_at, kill_wait=kill_wait_s(settings))
            return Verdict(
                Cause.UNKNOWN, False, last, f"the controller does not know the job any more ({error.evidence})", True, None
            )
        except SlurmError as error:
            retry = isinstance(error, (ControllerUnreachable, CommandTimeout))
            if not retry or clock.monotonic() >= until:
                last = deadline(None, heard_at=heard_at, kill_wait=kill_wait_s(settings))
                return Verdict(
                    Cause.UNKNOWN, False, last, f"Slurm could not be asked: {error.evidence or error.what}", False, None
                )
            time.sleep(0.5)
    if not settings:
        settings = _quietly(client.config, {})
    history: list[AccountingRecord] = []
    nodes: dict[str, NodeRecord] = {}
    preemption: dict[str, str] = {}
    if record.restarts > restart_count or record.state.may_return:
        nodes = _quietly(lambda: client.nodes(my_nodes), {}) if my_nodes else {}
        history = _quietly(lambda: client.history(job_id), [])
    elif record.preempt_at is not None:
        preemption = _quietly(lambda: ask_preemption(client, record.partition, record.qos, settings), {})
    found = judge(record, restart_count, now=clock.time(), lead_s=lead_s, history=history, nodes=nodes, preemption=preemption)
    cause, detail = found.cause, found.detail
    grace = grace_s(preemption) if preemption else None
    limit = deadline(record, heard_at=heard_at, kill_wait=kill_wait_s(settings), grace=grace)
    if cause is Cause.UNKNOWN and not found.by_hand and record.state.running:
        known: list[Reservation] = _quietly(client.reservations, [])
        coming = next_maintenance(known, my_nodes, now=clock.time(), own=record.fields.get("Reservation", ""))
        if coming is not None and coming.start_at - clock.time() <= MAINTENANCE_LEAD_S + SIGNAL_GRAIN_S:
            cause, limit = Cause.NODE_DRAINED, before_maintenance(coming.start_at, coming.name, limit)
            detail = f"the maintenance reservation {coming.name} begins {coming.start_at - clock.time():.0f} s from now"
    requeued = record.requeued and record.restarts > restart_count
    return Verdict(cause, requeued, limit, detail, True, record, waited, found.by_hand)


def judge(
    record: JobRecord,
    restart_count: int,
    *,
    now: float,
    lead_s: float = 0.0,
    history: Collection[AccountingRecord] = (),
    nodes: Mapping[str, NodeRecord] | None = None,
    preemption: Mapping[str, str] | None = None,
) -> Judgement:
    """The cause that the record shows, and how we know."""
    seen = f"JobState={record.state} Reason={record.reason or 'None'} Restarts={record.restarts} (ours {restart_count})"
    if record.state in _OF_STATE:
        return Judgement(_OF_STATE[record.state], seen)
    if record.restarts > restart_count:
        if record.state is JobState.COMPLETING and not record.requeued:
            return Judgement(Cause.CANCELLED, f"{seen}: requeued, and then ended before it started again")
        return _why_requeued(record, restart_count, seen, history, nodes or {})
    if record.state.running:
        if record.preempt_at is not None:
            return Judgement(Cause.PREEMPTION, f"{seen}, PreemptTime is set")
        if record.end_at is not None and record.end_at - now <= lead_s + SIGNAL_GRAIN_S:
            return Judgement(Cause.TIME_LIMIT, f"{seen}, {record.end_at - now:.0f} s before EndTime")
        return Judgement(Cause.UNKNOWN, f"{seen}: Slurm knows no reason for a warning (somebody's `scancel --signal`?)")
    if record.state is JobState.COMPLETING:
        if record.reason == "TimeLimit":
            return Judgement(Cause.TIME_LIMIT, seen)
        if record.preempt_at is not None and "CANCEL" in (preemption or {}).get("PreemptMode", ""):
            return Judgement(
                Cause.PREEMPTION, f"{seen}, PreemptTime is set and PreemptMode is CANCEL: Slurm will not requeue it"
            )
        if record.reason == "JobLaunchFailure":  # what Slurm 22.05 writes when the batch script was killed
            return Judgement(Cause.UNKNOWN, f"{seen}: Slurm ended the job because its batch script died; nobody cancelled it")
        return Judgement(Cause.CANCELLED, f"{seen}: ended without a requeue")
    return Judgement(Cause.UNKNOWN, seen)


def _why_requeued(
    record: JobRecord, restart_count: int, seen: str, history: Collection[AccountingRecord], nodes: Mapping[str, NodeRecord]
) -> Judgement:
    """After the requeue Slurm up to 22.05 shows the same record for every reason; others must tell."""
    if record.failed_node:
        return Judgement(Cause.NODE_LOST, f"{seen}, FailedNode={record.failed_node}")
    if Marks.read(record.comment).holder == BY_HAND:
        by_hand = "moved by `slurm-resilience requeue`"
        return Judgement(Cause.UNKNOWN, f"{by_hand}; {seen}", by_hand)
    closed = [entry for entry in history if entry.state.ended or entry.state is JobState.REQUEUED]
    if 0 <= restart_count < len(closed):
        last = closed[restart_count]
        if last.state in (JobState.PREEMPTED, JobState.NODE_FAIL):
            return Judgement(_OF_STATE[last.state], f"{seen}, accounting has {last.state} for that run")
        if last.state is JobState.REQUEUED:
            # RequeueExit, which accounting calls the same, comes after the end of the batch script: then nobody asks.
            by_hand = "by `scontrol requeue`, of its user or an admin"
            return Judgement(Cause.UNKNOWN, f"{by_hand}; {seen}, accounting has REQUEUED", by_hand)
    lost = sorted(name for name, node in nodes.items() if node.lost)
    if lost:
        return Judgement(Cause.NODE_LOST, f"{seen}, {','.join(lost)} is down or does not answer")
    return Judgement(
        Cause.UNKNOWN,
        f"{seen}: requeued, and Slurm does not say by whom (`scontrol requeue`, or a preemption without GraceTime)",
    )


def _quietly(call: Callable[[], _T], otherwise: _T) -> _T:
    """What helps to name the cause, where it is to be had: a failure here leaves the verdict less precise, no more."""
    try:
        return call()
    except SlurmError:
        return otherwise
