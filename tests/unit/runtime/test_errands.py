"""What the supervisor asks of Slurm, aside from its loop; the client is a plain object that knows a few nodes."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.runtime.errands import Errands
from slurm_resilience.runtime.inputs import AskSlurm, LookAtNodes, NodesSeen, Requeue, RequeueEnded, SlurmSaid
from slurm_resilience.runtime.requeue import Outcome
from slurm_resilience.slurm.failures import NoSuchJob
from slurm_resilience.slurm.records import NodeRecord
from slurm_resilience.slurm.reservations import Reservation, parse_reservations
from tests.unit.runtime.stage import job_record

LOST_AT = 1_800_000_000.0
PATIENCE_S = 60.0


class Slurm:
    """The few answers that errands need."""

    def __init__(self, **nodes: str) -> None:
        self.known = {name: NodeRecord.parse(f"NodeName={name} {line}") for name, line in nodes.items()}
        self.away = False
        self.reserved: list[Reservation] = []

    def job(self, job_id: str) -> Any:
        if self.away:
            raise NoSuchJob("Slurm knows no such job", evidence="it was asked")
        return job_record(PreemptTime="2027-01-15T08:00:00", EndTime="2027-01-15T08:00:30")

    def nodes(self, names: Any = ()) -> dict[str, NodeRecord]:
        if self.away:
            raise SlurmError("nobody there")
        return {name: self.known[name] for name in names or self.known if name in self.known}

    def config(self) -> dict[str, str]:
        return {"KillWait": "30 sec"}

    def partition(self, name: str) -> dict[str, str]:
        return {}

    def reservations(self) -> list[Reservation]:
        return self.reserved

    def history(self, job_id: str) -> list[Any]:
        return []


def errands(slurm: Any) -> tuple[Errands, queue.Queue[Any]]:
    answers: queue.Queue[Any] = queue.Queue()
    made = Errands(
        slurm,
        job_id="7",
        restart=0,
        nodes=("n1",),
        run_id="r",
        run_dir=Path("/r"),
        lead_s=0.0,
        config={"KillWait": "30 sec"},
        answer=answers.put,
    )
    return made, answers


def test_a_question_is_answered_from_the_record_of_the_job() -> None:
    made, answers = errands(Slurm())
    made.start()
    made.put(AskSlurm(LOST_AT))
    said = answers.get(timeout=PATIENCE_S)
    assert isinstance(said, SlurmSaid)
    assert said.verdict.cause is Cause.PREEMPTION


def test_a_requeue_that_slurm_does_not_know_of_ends_with_its_words() -> None:
    slurm = Slurm()
    slurm.away = True
    made, answers = errands(slurm)
    made.start()
    made.put(Requeue((1, 2), {}))
    ended = answers.get(timeout=PATIENCE_S)
    assert isinstance(ended, RequeueEnded)
    assert not ended.ok
    assert "does not know the job" in ended.reason
    assert ended.fields["action"] == "refused"


@pytest.mark.parametrize(
    ("node", "excluded"),
    [
        ("State=IDLE BootTime=2027-01-15T08:00:30", False),
        ("State=IDLE BootTime=2027-01-15T07:00:00", True),  # Slurm has not noticed yet
        ("State=DOWN* BootTime=2027-01-15T08:00:30", True),
        ("State=IDLE+DRAIN BootTime=2027-01-15T08:00:30", True),
        ("State=IDLE BootTime=None", True),
    ],
)
def test_a_lost_node_is_left_out_until_slurm_knows_that_it_was_started_again(node: str, excluded: bool) -> None:
    made, _ = errands(Slurm(n3=node))
    assert made._not_back({"n3": LOST_AT}) == (["n3"] if excluded else [])


def test_what_nobody_can_tell_is_left_out() -> None:
    slurm = Slurm()
    made, _ = errands(slurm)
    assert made._not_back({"n3": LOST_AT}) == ["n3"]
    slurm.away = True
    assert made._not_back({"n3": LOST_AT}) == ["n3"]
    assert made._not_back({}) == []


@pytest.mark.parametrize(
    ("state", "drained"),
    [
        ("ALLOCATED", {}),
        ("MIXED+DRAIN", {"n1": "noisy fan [root@2026-11-30T01:06:35]"}),
        ("ALLOCATED+FAIL", {"n1": "noisy fan [root@2026-11-30T01:06:35]"}),
        ("DOWN*", {}),
    ],
)
def test_a_look_at_the_nodes_tells_who_is_drained_and_how_many_others_there_are(state: str, drained: dict[str, str]) -> None:
    why = " Reason=noisy fan [root@2026-11-30T01:06:35]" if drained else ""
    others = {
        "n2": "State=IDLE Partitions=low,high",
        "n3": "State=IDLE+DRAIN Partitions=low",
        "n4": "State=IDLE Partitions=high",
    }
    made, answers = errands(Slurm(n1=f"State={state} Partitions=low{why}", **others))
    made.put(LookAtNodes(("n1",)))
    assert answers.get(timeout=PATIENCE_S) == NodesSeen(drained, room=1 if drained else None)


@pytest.mark.parametrize("state", ["ALLOCATED", "ALLOCATED+DRAIN"])
def test_a_look_that_fails_for_one_node_says_so(state: str) -> None:
    made, answers = errands(Slurm(n1=f"State={state} Partitions=low"))
    made.put(LookAtNodes(("n1", "n2")))
    seen = answers.get(timeout=PATIENCE_S)
    assert (seen.known, seen.untold) == (True, {"n2"})


@pytest.mark.parametrize(
    ("flags", "nodes", "seen"), [("MAINT,IGNORE_JOBS", "n[1-2]", True), ("MAINT", "n2", False), ("IGNORE_JOBS", "n1", False)]
)
def test_a_look_at_the_nodes_tells_of_a_maintenance_on_them(flags: str, nodes: str, seen: bool) -> None:
    slurm = Slurm(n1="State=ALLOCATED")
    line = f"ReservationName=m StartTime=2030-01-01T00:00:00 EndTime=2030-01-02T00:00:00 Nodes={nodes} Flags={flags}"
    slurm.reserved = parse_reservations(line)
    made, answers = errands(slurm)
    made.put(LookAtNodes(("n1",)))
    assert answers.get(timeout=PATIENCE_S).maintenance_at == (1893456000.0 if seen else None)


@pytest.mark.parametrize("there", [True, False])
def test_the_batch_script_is_asked_by_a_file(there: bool, tmp_path: Path) -> None:
    made, answers = errands(Slurm())
    wish = tmp_path / "wish" if there else tmp_path / "nowhere" / "wish"
    made._requeue_wish = str(wish)
    made.start()
    made.put(Requeue((1, 2), {}))
    ended = answers.get(timeout=PATIENCE_S)
    assert (ended.ok, ended.fields["action"], wish.exists()) == (there, "requeued" if there else "failed", there)


def test_a_slurm_that_does_not_answer_knows_of_no_drain() -> None:
    slurm = Slurm(n1="State=IDLE")
    slurm.away = True
    made, answers = errands(slurm)
    made.put(LookAtNodes(("n1",)))
    assert answers.get(timeout=PATIENCE_S).known is False


@pytest.mark.parametrize(
    ("outcome", "new_job"),
    [
        (Outcome("failed", "Slurm does not let this user requeue"), True),
        (Outcome("failed", "still held", held=True), False),  # whoever looks next frees it: two would be one too many
        (Outcome("refused", "it was cancelled"), False),
        (Outcome("requeued", "preempted"), False),
    ],
)
def test_what_cannot_come_back_goes_on_in_a_new_job(outcome: Outcome, new_job: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_resilience.runtime.errands.requeue", lambda *_, **__: outcome)
    monkeypatch.setattr("slurm_resilience.runtime.errands.resubmit", lambda *_, **__: "99")
    made, answers = errands(Slurm())
    made.start()
    made.put(Requeue((1, 2), {}))
    said = answers.get(timeout=PATIENCE_S)
    assert (said.fields["action"], said.fields.get("job")) == (("resubmitted", "99") if new_job else (outcome.action, None))
    assert said.ok is (new_job or outcome.ok)
