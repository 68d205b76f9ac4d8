"""The answers of Slurm 24.11.5, recorded in the same sandbox as those of 22.05.8."""

from __future__ import annotations

from slurm_resilience.slurm.records import NodeRecord, parse_config, parse_sacct
from slurm_resilience.slurm.states import JobState, parse_state
from tests.unit.slurm.recordings import job, lines, text


def test_a_name_and_a_comment_that_look_like_fields() -> None:
    record = job("24.11/job-running.txt")
    assert record.name == "a b JobState=COMPLETED x"
    assert record.comment == "lr=0.1 Restarts=7 it is"
    assert (record.state, record.restarts, record.requeue) == (JobState.RUNNING, 0, True)
    assert (record.nodes, record.batch_host, record.num_nodes) == (("n1", "n2", "n3"), "n1", (3, 3))
    assert record.start_at is not None
    assert record.end_at == record.start_at + 600
    assert record.command == "", "--wrap"


def test_what_comes_after_a_requeue() -> None:
    completing, pending = job("24.11/job-requeued-completing.txt"), job("24.11/job-requeued-pending.txt")
    assert (completing.state, pending.state) == (JobState.COMPLETING, JobState.PENDING)
    assert completing.requeued
    assert pending.requeued
    assert completing.restarts == pending.restarts == 1
    assert pending.eligible_at is not None
    assert pending.submit_at is not None
    assert pending.eligible_at - pending.submit_at == 121, "a requeue still waits for two minutes when nobody speeds it up"
    assert pending.num_nodes == (3, 3), "asked for were 2 to 3: what it had is taken for the fewest"


def test_a_cancelled_one_is_over() -> None:
    record = job("24.11/job-cancelled.txt")
    assert record.state is JobState.CANCELLED
    assert record.state.ended
    assert not record.requeued
    assert record.num_tasks == 0, "N/A"


def test_nodes() -> None:
    nodes = {node.name: node for node in map(NodeRecord.parse, lines("24.11/nodes.txt", "NodeName="))}
    assert sorted(nodes) == ["n1", "n2", "n3", "n4"]
    assert nodes["n1"].base == "MIXED"
    assert nodes["n1"].usable
    assert nodes["n4"].drained
    assert nodes["n4"].reason.startswith("bad gpu x=1")
    assert nodes["n1"].fields["OS"].endswith("@0")


def test_the_configuration() -> None:
    found = parse_config(text("24.11/config.txt"))
    assert found["SLURM_VERSION"] == "24.11.5"
    assert found["KillWait"] == "10 sec"
    assert found["PreemptMode"] == "REQUEUE"
    assert "MaxBatchRequeue" in found


def test_accounting() -> None:
    columns = ["JobID", "State", "ExitCode", "Restarts", "Start", "End", "NodeList"]
    first, last = parse_sacct(text("24.11/sacct-cancelled.txt"), columns)
    assert parse_state(first["State"]) is JobState.REQUEUED
    assert parse_state(last["State"]) is JobState.CANCELLED
    assert (first["Restarts"], last["Restarts"]) == ("0", "1")
