"""The deadline comes from Slurm's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_resilience.slurm.timeleft import deadline, grace_s, kill_wait_s
from tests.unit.slurm.recordings import job


def test_in_the_grace_period_the_end_is_the_deadline() -> None:
    record = job("job-preempted-grace.txt")
    assert record.end_at is not None
    assert record.preempt_at is not None
    found = deadline(record, heard_at=record.preempt_at, kill_wait=10.0, margin_s=2.0)
    assert found.soft_at == record.end_at - 2.0
    assert found.kill_at == record.end_at + 10.0
    assert "grace" in found.source
    assert 10 < found.left_s(record.preempt_at) < 20  # GraceTime is 15


def test_before_the_time_limit() -> None:
    record = job("job-running.txt")
    assert record.end_at is not None
    found = deadline(record, heard_at=record.end_at - 90)
    assert found.left_s(record.end_at - 90) == 88.0
    assert "time limit" in found.source


def test_an_end_that_is_nearer_than_killwait_leaves_killwait() -> None:
    """After `scontrol update TimeLimit` the warning comes when the job's time is over, or nearly."""
    record = job("job-running.txt")
    assert record.end_at is not None
    for left_s in (0.0, 3.0, 10.0):
        found = deadline(record, heard_at=record.end_at - left_s, kill_wait=10.0, margin_s=2.0)
        assert found.left_s(record.end_at - left_s) == 8.0
        assert found.soft_at <= found.kill_at - 2.0
    assert deadline(record, heard_at=record.end_at - 15.0, kill_wait=10.0, margin_s=2.0).left_s(record.end_at - 15.0) == 13.0


@pytest.mark.parametrize(
    "name", ["job-cancelled-completing.txt", "job-requeued-completing.txt", "job-timelimit-completing.txt", None]
)
def test_once_everybody_was_told_only_killwait_is_left(name: str | None) -> None:
    record = job(name) if name else None
    found = deadline(record, heard_at=1000.0, kill_wait=10.0, margin_s=2.0)
    assert (found.soft_at, found.kill_at) == (1008.0, 1010.0)


def test_a_grace_period_that_is_over_but_goes_on_is_not_counted_on() -> None:
    record = job("job-preempted-grace.txt")
    assert record.end_at is not None
    assert deadline(record, heard_at=record.end_at + 5, kill_wait=10.0, margin_s=0).kill_at == record.end_at + 15


@pytest.mark.parametrize(
    ("config", "seconds"), [({"KillWait": "10 sec"}, 10), ({"KillWait": "1 sec"}, 5), ({}, 30), ({"KillWait": "x"}, 30)]
)
def test_kill_wait(config: dict[str, str], seconds: float) -> None:
    assert kill_wait_s(config) == seconds


def test_grace() -> None:
    assert grace_s({"GraceTime": "15"}) == 15
    assert grace_s({}) == 0


def test_a_job_without_a_time_limit_shows_no_end_in_its_grace_period() -> None:
    """scontrol prints EndTime=Unknown for TimeLimit=UNLIMITED; then the partition's GraceTime counts."""
    record = replace(job("job-preempted-grace.txt"), end_at=None)
    assert record.preempt_at is not None
    heard_at = record.preempt_at + 1
    assert deadline(record, heard_at=heard_at, kill_wait=10.0, grace=15.0, margin_s=0).soft_at == record.preempt_at + 15.0
    assert deadline(record, heard_at=heard_at, kill_wait=10.0, grace=0.0, margin_s=0).soft_at == heard_at + 10.0
    assert deadline(record, heard_at=heard_at, kill_wait=10.0, margin_s=0).soft_at == heard_at + 10.0
