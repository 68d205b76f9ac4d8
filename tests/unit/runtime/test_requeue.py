"""What the requeue recipe does when Slurm does not play along.  That it works is shown on the real one, in tests/slurm."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from slurm_resilience.errors import SlurmError
from slurm_resilience.runtime.requeue import requeue
from slurm_resilience.slurm.client import AccountingRecord, QueueEntry, SlurmClient
from slurm_resilience.slurm.failures import (
    CommandTimeout,
    ControllerUnreachable,
    JobFinished,
    JobNotPending,
    NoSuchJob,
    RequeueDisabled,
)
from slurm_resilience.slurm.mark import Marks
from slurm_resilience.slurm.records import JobRecord, NodeRecord
from slurm_resilience.slurm.reservations import Reservation
from slurm_resilience.slurm.states import JobState
from tests.unit.slurm.recordings import job as recorded


class Controller:
    """As much of slurmctld as the recipe talks to, one job of it; transitions as seen on 22.05.8.

    ``trouble``: for a call, what to raise the next times it is made.
    """

    def __init__(self, record: JobRecord, **trouble: list[SlurmError]) -> None:
        self.record = record
        self.trouble = trouble
        self.calls: list[str] = []
        self.updates: list[dict[str, str]] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.trouble.get(name):
            raise self.trouble[name].pop(0)

    def _set(self, **fields: Any) -> None:
        self.record = dataclasses.replace(self.record, **fields)

    def job(self, job_id: str) -> JobRecord:
        self._called("job")
        return self.record

    def queue(self, user: str) -> list[QueueEntry]:
        return [QueueEntry(self.record.job_id, self.record.state, self.record.reason, self.record.comment)]

    def jobs(self, user: str) -> list[JobRecord]:
        return [self.record]

    def pending(self, user: str) -> list[JobRecord]:
        return [self.record]

    def history(self, job_id: str) -> list[AccountingRecord]:
        self._called("history")
        return []

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeRecord]:
        self._called("nodes")
        return {name: NodeRecord.parse(f"NodeName={name} State=IDLE") for name in names if name.startswith("n")}

    def qos(self, name: str) -> dict[str, str]:
        raise AssertionError("nobody asked for that")

    def reservations(self) -> list[Reservation]:
        raise AssertionError("nobody asked for that")

    def partition(self, name: str) -> dict[str, str]:
        self._called("partition")
        return {"Nodes": "n[1-4]", "PreemptMode": "REQUEUE"}

    def config(self) -> dict[str, str]:
        self._called("config")
        return {"Epilog": "/etc/epilog"}

    def update(self, job_id: str, **fields: str) -> None:
        self._called(f"update {next(iter(fields))}")
        self.updates.append(fields)
        if "Comment" in fields:
            self._set(comment=fields["Comment"])
        if "Requeue" in fields:
            self._set(requeue=True)
        if "StartTime" in fields:
            self._set(eligible_at=float(int(time.time()) + int(fields["StartTime"].removeprefix("now+"))))
        if "ExcNodeList" in fields:
            self._set(excluded=tuple(fields["ExcNodeList"].split(",")))

    def requeue(self, job_id: str) -> bool:
        raise AssertionError("a plain requeue races with its own TERM")

    def requeuehold(self, job_id: str) -> bool:
        self._called("requeuehold")
        if self.record.requeued:
            return False
        start = time.time()
        self._set(state=JobState.COMPLETING, restarts=self.record.restarts + 1, priority=0, reason="", start_at=start,
                  end_at=start + (self.record.time_limit_s or 0))  # fmt: skip
        return True

    def hold(self, job_id: str) -> None:
        self._called("hold")
        self._set(priority=0)

    def release(self, job_id: str) -> None:
        self._called("release")
        self._set(priority=100)

    def cancel(self, job_id: str) -> None:
        raise AssertionError("nobody asked for that")

    def submit(self, script: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str:
        raise AssertionError("nobody asked for that")


def running(**changes: Any) -> JobRecord:
    return dataclasses.replace(recorded("job-running.txt"), comment="mine", **changes)


def run(controller: Controller, **more: Any) -> Any:
    client: SlurmClient = controller
    return requeue(client, "32", **{"restart_count": 0, "marker": "a run", "patience_s": 3.0, "start_in_s": 5.0, **more})


def test_the_order_of_the_calls() -> None:
    slurm = Controller(running())
    outcome = run(slurm, nodes=(2, 3), exclude=["n1"])
    assert outcome.ok
    changing = [call for call in slurm.calls if call.startswith("update") or call in ("hold", "requeuehold", "release")]
    assert changing == ["update Comment", "hold", "requeuehold", "update ExcNodeList", "update NumNodes", "update StartTime",
                        "release", "update Comment"]  # fmt: skip
    assert slurm.record.comment.startswith("mine [slurm-resilience excluded n1 at ")
    assert slurm.updates[0]["Comment"].startswith("mine [slurm-resilience requeue a-run at ")
    assert json.dumps(outcome.as_fields())


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (recorded("job-cancelled-completing.txt"), "cancelled"),
        (recorded("job-cancelled.txt"), "cancelled"),
        (running(restarts=1), "newer run"),
        (dataclasses.replace(recorded("job-requeued-pending.txt"), restarts=2), "newer run"),
        (running(state=JobState.COMPLETED), "over"),
        (running(state=JobState.FAILED), "over"),
    ],
)
def test_what_must_not_come_back_is_not_touched(record: JobRecord, why: str) -> None:
    slurm = Controller(record)
    outcome = run(slurm)
    assert outcome.action == "refused"
    assert why in outcome.reason
    assert slurm.updates == []
    assert "requeuehold" not in slurm.calls


def test_cancelled_between_the_question_and_the_hold() -> None:
    """`hold` is refused for a job that is over: the controller's own word at that instant."""
    slurm = Controller(running(), hold=[JobFinished("it is over")])
    outcome = run(slurm)
    assert outcome.action == "refused"
    assert "requeuehold" not in slurm.calls
    assert slurm.record.comment == "mine"


def test_at_the_time_limit_the_job_is_over_and_may_come_back_all_the_same() -> None:
    slurm = Controller(recorded("job-timelimit-completing.txt"), hold=[JobFinished("it is over")])
    assert run(slurm).ok
    assert "requeuehold" in slurm.calls


def test_a_slurm_that_holds_only_pending_jobs() -> None:
    slurm = Controller(running(), hold=[JobNotPending("running")])
    assert run(slurm).ok


def test_already_requeued_by_the_controller() -> None:
    slurm = Controller(recorded("job-requeued-completing.txt"))
    assert run(slurm, nodes=(1, 2)).ok
    assert slurm.record.restarts == 1


def test_no_requeue_is_lifted_first_and_once_more_when_somebody_is_quicker() -> None:
    slurm = Controller(running(requeue=False), requeuehold=[RequeueDisabled("no")])
    assert run(slurm).ok
    assert slurm.calls.count("update Requeue") == 2


def test_a_controller_that_is_away_for_a_moment() -> None:
    slurm = Controller(
        running(),
        job=[ControllerUnreachable("away")],
        requeuehold=[CommandTimeout("slow")],
        release=[ControllerUnreachable("away")],
    )
    outcome = run(slurm, patience_s=20.0)
    assert outcome.ok
    assert any("away" in step.result for step in outcome.steps)


def test_a_controller_that_stays_away_is_given_up_in_time() -> None:
    slurm = Controller(running(), job=[ControllerUnreachable("away")] * 100)
    started = time.monotonic()
    outcome = run(slurm, patience_s=1.0)
    assert outcome.action == "failed"
    assert not outcome.held
    assert time.monotonic() - started < 40  # each of a hundred answers is followed by a wait


def test_a_failure_after_the_hold_leaves_the_job_as_it_was() -> None:
    slurm = Controller(running(), requeuehold=[SlurmError("no")])
    outcome = run(slurm)
    assert (outcome.action, outcome.held) == ("failed", False)
    assert slurm.record.priority != 0
    assert slurm.record.comment == "mine"


def test_a_hold_that_cannot_be_released_keeps_its_marker_for_the_sweep() -> None:
    slurm = Controller(running(), release=[SlurmError("no")] * 10)
    outcome = run(slurm)
    assert (outcome.action, outcome.held) == ("failed", True)
    assert "slurm-resilience requeue" in slurm.record.comment


def test_a_hold_of_the_users_own_stays() -> None:
    """Slurm lets a running job be held: it shall not start again after a requeue."""
    slurm = Controller(running(reason="JobHeldUser", priority=0))
    outcome = run(slurm)
    assert (outcome.ok, outcome.held) == (True, True)
    assert "release" not in slurm.calls
    assert slurm.record.comment == "mine"


@pytest.mark.parametrize(("comment", "stays"), [("mine", True), (str(Marks("mine").held_by("a run", 1.0)), False)])
def test_a_requeuehold_of_somebody_stays_and_one_of_ours_goes_on(comment: str, stays: bool) -> None:
    """`scontrol requeuehold` on a running job: when the ranks have saved, Slurm has it back in the queue, held."""
    requeued = recorded("job-requeued-completing.txt")
    slurm = Controller(dataclasses.replace(requeued, reason="job_requeued_in_held_state", priority=0, comment=comment))
    outcome = run(slurm)
    assert (outcome.ok, outcome.held) == (True, stays), outcome
    assert ("release" in slurm.calls) is not stays


def test_what_is_only_wished_does_not_stop_the_requeue() -> None:
    slurm = Controller(
        running(), **{f"update {name}": [SlurmError("no")] * 5 for name in ("NumNodes", "ExcNodeList", "Comment")}
    )
    outcome = run(slurm, nodes=(2, 3), exclude=["n1"])
    assert outcome.ok
    assert outcome.nodes is None
    assert outcome.excluded == ()


@pytest.mark.parametrize(
    ("existing", "asked", "fewest", "kept"),
    [
        ((), ["n1", "n2"], 2, ("n1", "n2")),
        ((), ["n1", "n2", "n3"], 2, ("n1", "n2")),
        ((), ["gone", "n1"], 1, ("n1",)),
        (("n4",), ["n1"], 2, ("n4", "n1")),
        (("n4",), ["n4"], 2, ("n4",)),
        (("n3", "n4"), ["n1"], 2, ("n3", "n4")),
    ],
)
def test_exclusions(existing: tuple[str, ...], asked: list[str], fewest: int, kept: tuple[str, ...]) -> None:
    """spd#263: a name that is no node any more is dropped."""
    slurm = Controller(running(excluded=existing))
    outcome = run(slurm, nodes=(fewest, 4), exclude=asked)
    assert outcome.excluded == kept


def test_our_own_exclusions_expire_and_the_users_do_not() -> None:
    for age, kept in ((60.0, ("n4", "n2", "n1")), (5000.0, ("n4", "n2"))):
        comment = f"mine [slurm-resilience excluded n1 at {time.time() - age:.0f}]"
        slurm = Controller(dataclasses.replace(running(excluded=("n4", "n1")), comment=comment))
        assert run(slurm, nodes=(1, 4), exclude=["n2"]).excluded == kept
        assert Marks.read(slurm.record.comment).excluded == tuple(sorted(set(kept) - {"n4"}))


def test_a_requeue_by_hand_that_is_in_work_keeps_its_hold() -> None:
    comment = f"mine [slurm-resilience requeue by-hand at {time.time() - 5:.0f}]"
    slurm = Controller(dataclasses.replace(recorded("job-requeued-completing.txt"), comment=comment, priority=0))
    outcome = run(slurm)
    assert (outcome.ok, outcome.held) == (True, True)
    assert "release" not in slurm.calls
    assert slurm.record.comment == comment


def test_nothing_is_excluded_when_nobody_knows_what_would_be_left() -> None:
    slurm = Controller(running(), nodes=[ControllerUnreachable("away")] * 100)
    assert run(slurm, exclude=["n1"], patience_s=0.5).excluded == ()


@pytest.mark.parametrize("nodes", [(2, 3), (2, 2)])
def test_both_ends_of_the_node_count_are_said(nodes: tuple[int, int]) -> None:
    slurm = Controller(running())
    assert run(slurm, nodes=nodes).nodes == nodes
    assert {"NumNodes": f"{nodes[0]}-{nodes[1]}"} in slurm.updates


def test_required_nodes_that_are_excluded_are_not_required_any_more() -> None:
    slurm = Controller(running(required=("n1", "n2")))
    run(slurm, nodes=(1, 4), exclude=["n1"])
    assert {"ReqNodeList": "n2"} in slurm.updates


@pytest.mark.parametrize(
    ("dead", "shrunk"), [(["n3"], {"NodeList": "n[1-2,4]"}), (["n1"], None), (["n9"], None), ([], None), (["n1", "n3"], None)]
)
def test_dead_nodes_but_not_the_batch_host_are_taken_out(dead: list[str], shrunk: dict[str, str] | None) -> None:
    slurm = Controller(running())
    run(slurm, dead=dead)
    assert [update for update in slurm.updates if "NodeList" in update] == ([shrunk] if shrunk else [])


def test_a_fixed_number_of_tasks_follows_the_nodes() -> None:
    record = running()
    slurm = Controller(dataclasses.replace(record, fields={**record.fields, "NtasksPerN:B:S:C": "2:0:*:*"}))
    run(slurm, nodes=(3, 4))
    assert {"NumTasks": "6"} in slurm.updates
    elastic = Controller(record)
    run(elastic, nodes=(3, 4))
    assert not any("NumTasks" in update for update in elastic.updates)


def test_a_lost_begin_time_is_set_again() -> None:
    slurm = Controller(running(), **{"update StartTime": [SlurmError("no")]})
    assert run(slurm).start_at is not None
    assert slurm.calls.count("update StartTime") == 2


def test_gone() -> None:
    slurm = Controller(running(), job=[NoSuchJob("gone")])
    assert run(slurm).action == "refused"
