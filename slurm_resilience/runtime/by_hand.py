"""A user's own wish: give this job other nodes, now.  From a login node, while its supervisor saves and ends by itself.

    requeuehold (TERM goes to the job, which saves) → wait until it is in the queue → other nodes → StartTime=now → release

The hold carries our mark, so the job's supervisor, which runs its own recipe meanwhile, leaves it in place, and so that
whoever looks next frees the job if we die in between.  A cancelled job stays cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.runtime.reshape import reshape
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.failures import CommandTimeout, ControllerUnreachable, RequeueDisabled
from slurm_resilience.slurm.mark import BY_HAND, Marks
from slurm_resilience.slurm.patient import Patient
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState
from slurm_resilience.slurm.watch import SETTLED_S

_LOOK_EVERY_S = 0.4
# Orphans are swept after 30 s: the mark is renewed well before.
_RENEW_S = 10.0
_STARTS_WITHIN_S = 20.0


@dataclass(frozen=True)
class Moved:
    """``ok``: the job is in the queue, free to start, with these wishes.  ``running``: it has started already."""

    ok: bool
    said: str
    running: bool = False
    nodes: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()


def refusal(record: JobRecord) -> str:
    """Why a job is not moved; "" when it can be.  Pure."""
    if record.fields.get("BatchFlag", "1") == "0":
        return "it is no batch job: Slurm requeues only those"
    if record.fields.get("HetJobOffset", "0") != "0":
        whole = record.fields.get("HetJobId", "")
        return f"it is a component of the heterogeneous job {whole}: give {whole}, Slurm requeues all components together"
    if record.state is JobState.CANCELLED or (record.state is JobState.COMPLETING and not record.requeued):
        return "it was cancelled or is ending: it stays so; submit again with --run-dir to go on with its run"
    if record.state is JobState.COMPLETED:
        return "it is complete"
    return ""


def move(
    client: SlurmClient,
    record: JobRecord,
    *,
    nodes: tuple[int, int] | None = None,
    exclude: tuple[str, ...] = (),
    within_s: float = 180.0,
    show: Callable[[str], None] = lambda line: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Moved:
    """Requeue the job (or take it as it waits), change its nodes, start it.  Blocks until it can start, ``within_s`` at most.

    Raises :class:`SlurmError` when Slurm refuses the requeue itself.
    """
    job_id, until = record.job_id, clock.monotonic() + within_s
    slurm = Patient(client, job_id, until=clock.monotonic() + 30.0, clock=clock)
    marks = Marks.read(record.comment).held_by(BY_HAND, clock.time())
    slurm.wish("mark", Comment=str(marks))
    if record.state.waiting:
        slurm.must("hold", lambda: client.hold(job_id))
    else:
        if not record.requeue:
            slurm.must("allow requeue", lambda: slurm.update(Requeue="1"))
        try:
            slurm.must("requeuehold", lambda: client.requeuehold(job_id))
        except RequeueDisabled:
            slurm.wish("unmark", Comment=str(marks.let_go()))
            raise
        show(f"job {job_id}: requeued; it saves and ends")
    pending = _wait_until_pending(slurm, marks, until, clock)
    if pending is None:
        return Moved(False, f"it has not come back into the queue after {within_s:.0f} s; it is held, and `watch` will free it")
    if not pending.state.waiting:
        slurm.wish("unmark", Comment=str(marks.let_go()))
        return Moved(False, f"it is {pending.state} by now: somebody else was quicker")
    asked, excluded, marks = reshape(slurm, marks, nodes, exclude)
    time.sleep(SETTLED_S)
    slurm.wish("StartTime", StartTime="now")
    slurm.must("release", lambda: client.release(job_id))
    slurm.wish("unmark", Comment=str(marks.let_go()))
    last = _see_it_start(slurm, clock)
    if last is not None and last.state.running:
        return Moved(True, f"running on {','.join(last.nodes)}", True, asked, excluded)
    why = f" (Reason={last.reason})" if last is not None and last.reason else ""
    return Moved(True, f"in the queue{why}", False, asked, excluded)


def _wait_until_pending(slurm: Patient, marks: Marks, until: float, clock: Clock) -> JobRecord | None:
    renew_at = clock.monotonic() + _RENEW_S
    while clock.monotonic() < until:
        record = _look(slurm)
        if record is not None and record.state is not JobState.COMPLETING and not record.state.running:
            return record
        if clock.monotonic() >= renew_at:
            slurm.wish("mark", Comment=str(marks.held_by(BY_HAND, clock.time())))
            renew_at = clock.monotonic() + _RENEW_S
        time.sleep(_LOOK_EVERY_S)
    return None


def _see_it_start(slurm: Patient, clock: Clock) -> JobRecord | None:
    until, asked_at, record = clock.monotonic() + _STARTS_WITHIN_S, clock.monotonic(), None
    while clock.monotonic() < until:
        record = _look(slurm)
        if record is None or not record.state.waiting or record.reason in ("Resources", "Priority"):
            break
        if record.reason == "BeginTime" and clock.monotonic() - asked_at > 2.0:
            asked_at = clock.monotonic()
            slurm.wish("StartTime", StartTime="now")
        time.sleep(_LOOK_EVERY_S)
    return record


def _look(slurm: Patient) -> JobRecord | None:
    try:
        return slurm.client.job(slurm.job_id)
    except (ControllerUnreachable, CommandTimeout):
        return None
