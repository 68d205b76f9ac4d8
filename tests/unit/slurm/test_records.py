"""What scontrol prints, read from answers that a real Slurm gave (in recorded/, each says how)."""

from __future__ import annotations

import pytest

from slurm_resilience.slurm.records import (
    JobRecord,
    NodeRecord,
    parse_config,
    parse_duration,
    parse_fields,
    parse_time,
)
from slurm_resilience.slurm.states import JobState
from tests.unit.slurm.recordings import job, jobs, lines, text


def test_a_name_and_a_comment_that_look_like_fields() -> None:
    record = job("job-running.txt")
    assert record.name == "a b JobState=COMPLETED x"
    assert record.comment == "lr=0.1 Restarts=7 it is"
    assert record.state is JobState.RUNNING
    assert record.restarts == 0


def test_the_fields_of_a_running_elastic_job() -> None:
    record = job("job-running.txt")
    assert record.nodes == ("n1", "n2", "n3", "n4")
    assert record.batch_host == "n1"
    assert record.num_nodes == (4, 4)
    assert record.requeue
    assert record.user == "alice"
    assert record.partition == "low"
    assert record.time_limit_s == 600.0
    assert record.start_at is not None
    assert record.end_at == record.start_at + 600
    assert record.preempt_at is None
    assert record.excluded == ()
    assert not record.held
    assert record.command.endswith("/stub.sh")


def test_what_comes_after_a_requeue_is_told_from_what_does_not() -> None:
    """The state word is COMPLETING for both."""
    gone, back = job("job-cancelled-completing.txt"), job("job-requeued-completing.txt")
    assert gone.state is JobState.COMPLETING
    assert back.state is JobState.COMPLETING
    assert not gone.requeued
    assert back.requeued
    assert job("job-requeued-pending.txt").requeued
    assert not job("job-timelimit-completing.txt").requeued
    assert not job("job-running.txt").requeued


def test_tasks_of_an_array_go_by_array_and_task() -> None:
    tasks = jobs("job-array.txt")
    array = tasks[0].fields["ArrayJobId"]
    assert {task.job_id for task in tasks} == {f"{array}_1", f"{array}_2"}


def test_held() -> None:
    assert job("job-held.txt").held
    assert not job("job-requeued-pending.txt").held


def test_nodes_and_what_they_are_good_for() -> None:
    nodes = {record.name: record for record in map(NodeRecord.parse, lines("nodes.txt", "NodeName="))}
    assert (nodes["n1"].usable, nodes["n1"].lost) == (True, False)
    assert (nodes["n2"].usable, nodes["n2"].lost) == (False, False)  # drained
    assert (nodes["n3"].usable, nodes["n3"].lost) == (False, True)  # down
    assert nodes["n2"].reason.startswith("bad fan = loud")
    assert nodes["n1"].boot_at is not None


@pytest.mark.parametrize(
    ("state", "usable", "lost"),
    [("IDLE*", False, True), ("MIXED", True, False), ("IDLE+DRAIN", False, False), ("DOWN*+DRAIN", False, True),
     ("ALLOCATED+CLOUD", True, False), ("IDLE+POWERED_DOWN", False, True), ("UNKNOWN", False, True),
     ("IDLE+NOT_RESPONDING", False, True), ("IDLE~+CLOUD", True, False)],
)  # fmt: skip
def test_states_of_nodes(state: str, usable: bool, lost: bool) -> None:
    node = NodeRecord.parse(f"NodeName=n1 State={state} Reason=x y")
    assert (node.usable, node.lost) == (usable, lost)


def test_settings() -> None:
    config = parse_config(text("config.txt"))
    assert config["KillWait"] == "10 sec"
    assert config["EpilogSlurmctld"] == ""
    assert config["SlurmctldHost[0]"]
    partition = parse_fields(next(iter(lines("partition.txt", "PartitionName="))))
    assert partition["GraceTime"] == "15"
    assert partition["PreemptMode"] == "REQUEUE"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:10:00", 600),
        ("1-00:00:00", 86400),
        ("2-12", 216000),
        ("30", 1800),
        ("30:15", 1815),
        ("UNLIMITED", None),
        ("", None),
        (None, None),
    ],
)
def test_durations(text: str | None, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "at"), [("1970-01-02T00:00:01", 86401.0), ("Unknown", None), ("None", None), ("N/A", None), (None, None)]
)
def test_times_are_utc(text: str | None, at: float | None) -> None:
    assert parse_time(text) == at


def test_unknown_fields_are_kept() -> None:
    record = JobRecord.parse("JobId=1 JobName=x UserId=a(1) GroupId=a(1) JobState=RUNNING NewThing=7 Comment=a b")
    assert record.fields["NewThing"] == "7"
    assert record.comment == "a b"


def test_no_job_is_an_error() -> None:
    with pytest.raises(ValueError, match="no job"):
        JobRecord.parse("slurm_load_jobs error: Invalid job id specified")
