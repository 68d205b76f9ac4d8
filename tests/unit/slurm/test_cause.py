"""Why a job ends, judged from records that a real Slurm gave in exactly that situation."""

from __future__ import annotations

import dataclasses

import pytest

from slurm_resilience.errors import Cause
from slurm_resilience.slurm.cause import judge
from slurm_resilience.slurm.client import AccountingRecord
from slurm_resilience.slurm.records import JobRecord, NodeRecord
from slurm_resilience.slurm.states import JobState
from tests.unit.slurm.recordings import job


def at(record: JobRecord, before_end_s: float) -> float:
    assert record.end_at is not None
    return record.end_at - before_end_s


@pytest.mark.parametrize(
    ("name", "restarts", "cause"),
    [
        ("job-preempted-grace.txt", 0, Cause.PREEMPTION),
        ("job-cancelled-completing.txt", 0, Cause.CANCELLED),
        ("job-cancelled.txt", 0, Cause.CANCELLED),
        ("job-timelimit-completing.txt", 0, Cause.TIME_LIMIT),
        ("job-requeued-completing.txt", 0, Cause.UNKNOWN),  # preempted, lost a node or requeued by hand: Slurm shows the same
        ("job-requeued-pending.txt", 0, Cause.UNKNOWN),
    ],
)
def test_the_record_names_the_cause(name: str, restarts: int, cause: Cause) -> None:
    record = job(name)
    assert judge(record, restarts, now=at(record, 300) if record.end_at else 0.0).cause is cause


def test_the_coming_time_limit() -> None:
    record = job("job-running.txt")
    assert judge(record, 0, now=at(record, 80), lead_s=30).cause is Cause.TIME_LIMIT
    assert judge(record, 0, now=at(record, 100), lead_s=30).cause is Cause.UNKNOWN


def test_scancel_after_the_requeue_is_a_cancel() -> None:
    """Recorded by hand on 22.05.8: start and end are those of the run that was, not those of one to come."""
    record = job("job-requeued-completing.txt")
    assert record.start_at is not None
    cancelled = dataclasses.replace(record, end_at=record.start_at + 3.0)
    assert judge(cancelled, 0, now=at(record, 0)).cause is Cause.CANCELLED


def test_preempted_for_good_where_the_mode_is_cancel() -> None:
    record = dataclasses.replace(job("job-cancelled-completing.txt"), preempt_at=1.0)
    assert judge(record, 0, now=0.0, preemption={"PreemptMode": "CANCEL"}).cause is Cause.PREEMPTION
    assert judge(record, 0, now=0.0, preemption={"PreemptMode": "REQUEUE"}).cause is Cause.CANCELLED
    assert judge(record, 0, now=0.0).cause is Cause.CANCELLED


def test_a_killed_batch_script_is_no_cancel() -> None:
    """Recorded by hand on 22.05.8: `kill -9` of the batch shell, JobState=COMPLETING Reason=JobLaunchFailure ExitCode=0:9."""
    record = dataclasses.replace(job("job-cancelled-completing.txt"), reason="JobLaunchFailure")
    found = judge(record, 0, now=0.0)
    assert (found.cause, found.by_hand) == (Cause.UNKNOWN, "")
    assert "batch script" in found.detail
    assert judge(dataclasses.replace(record, reason=""), 0, now=0.0).cause is Cause.CANCELLED


def history(*states: JobState) -> list[AccountingRecord]:
    return [AccountingRecord("1", state, None, 0, 0, float(at), float(at), float(at)) for at, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "cause", "by_hand"),
    [
        ((JobState.PREEMPTED, JobState.PENDING), Cause.PREEMPTION, ""),
        ((JobState.NODE_FAIL, JobState.PENDING), Cause.NODE_LOST, ""),
        ((JobState.REQUEUED, JobState.PENDING), Cause.UNKNOWN, "by `scontrol requeue`, of its user or an admin"),
        ((JobState.RUNNING,), Cause.UNKNOWN, ""),  # accounting lags: our run is not closed yet
    ],
)
def test_accounting_tells_why_it_was_requeued(states: tuple[JobState, ...], cause: Cause, by_hand: str) -> None:
    found = judge(job("job-requeued-completing.txt"), 0, now=0.0, history=history(*states))
    assert (found.cause, found.by_hand) == (cause, by_hand)
    assert found.detail.startswith(by_hand)


def test_a_requeue_of_ours_by_hand_is_known_by_its_mark() -> None:
    record = job("job-requeued-completing.txt")
    marked = dataclasses.replace(record, comment="resilient [slurm-resilience requeue by-hand at 1700000000]")
    found = judge(marked, 0, now=0.0)
    assert (found.cause, found.by_hand) == (Cause.UNKNOWN, "moved by `slurm-resilience requeue`")
    assert found.detail.startswith("moved by `slurm-resilience requeue`;")
    # A supervisor's own requeue says nothing about why.
    other = dataclasses.replace(record, comment="resilient [slurm-resilience requeue r1-c2 at 1700000000]")
    assert judge(other, 0, now=0.0).by_hand == ""
    lost = judge(dataclasses.replace(marked, failed_node="n4"), 0, now=0.0)
    assert (lost.cause, lost.by_hand) == (Cause.NODE_LOST, "")
    still = dataclasses.replace(marked, restarts=0, state=JobState.RUNNING)
    assert judge(still, 0, now=0.0).by_hand == ""


def test_an_older_run_of_the_job_does_not_answer_for_this_one() -> None:
    record = dataclasses.replace(job("job-requeued-completing.txt"), restarts=2)
    runs = history(JobState.PREEMPTED, JobState.NODE_FAIL, JobState.PENDING)
    assert judge(record, 1, now=0.0, history=runs).cause is Cause.NODE_LOST


def test_a_lost_node_of_ours_explains_the_requeue() -> None:
    record = job("job-requeued-completing.txt")
    down = NodeRecord.parse("NodeName=n2 State=DOWN* Reason=x")
    found = judge(record, 0, now=0.0, nodes={"n2": down})
    assert found.cause is Cause.NODE_LOST
    assert "n2" in found.detail
    assert judge(dataclasses.replace(record, failed_node="n4"), 0, now=0.0).cause is Cause.NODE_LOST
