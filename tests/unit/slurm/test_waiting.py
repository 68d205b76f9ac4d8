"""What keeps a job in the queue and what helps; and the watch's timing.  The real Slurm is in tests/slurm."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.client import QueueEntry
from slurm_resilience.slurm.failures import ControllerUnreachable, NotPermitted
from slurm_resilience.slurm.mark import Marks
from slurm_resilience.slurm.records import JobRecord, NodeRecord
from slurm_resilience.slurm.reservations import Reservation
from slurm_resilience.slurm.states import JobState
from slurm_resilience.slurm.waiting import MOST_FREED, Trouble, help_job, sweep, trouble
from slurm_resilience.slurm.watch import Watch
from tests.unit.slurm.recordings import job as recorded

MARK = "[slurm-resilience requeue a-run at 1000]"


class Clock:
    def __init__(self) -> None:
        self.now = 2000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Controller:
    """One job in the queue, and what was done to it."""

    def __init__(self, record: JobRecord, refuse: dict[str, SlurmError] | None = None) -> None:
        self.record, self.refuse, self.calls = record, refuse or {}, []  # type: ignore[var-annotated]
        self.gone = False

    def _called(self, call: str) -> None:
        if call in self.refuse:
            raise self.refuse[call]
        self.calls.append(call)

    def queue(self, user: str) -> list[QueueEntry]:
        self._called("queue")
        self.calls.remove("queue")
        if self.gone:
            return []
        return [QueueEntry(self.record.job_id, self.record.state, self.record.reason, self.record.comment)]

    def job(self, job_id: str) -> JobRecord:
        return self.record

    def pending(self, user: str) -> list[JobRecord]:
        return [self.record]

    def qos(self, name: str) -> dict[str, str]:
        raise AssertionError("nobody asked for that")

    def reservations(self) -> list[Reservation]:
        raise AssertionError("nobody asked for that")

    def partition(self, name: str) -> dict[str, str]:
        return {"Nodes": "n[1-4]"}

    def nodes(self, names: Any = ()) -> dict[str, NodeRecord]:
        return {name: NodeRecord.parse(f"NodeName={name} State={'DOWN' if name == 'n4' else 'IDLE'}") for name in names}

    def requeue(self, job_id: str) -> bool:
        self._called("requeue")
        return True

    def release(self, job_id: str) -> None:
        self._called("release")
        self.record = dataclasses.replace(self.record, priority=100, reason="Priority")

    def update(self, job_id: str, **fields: str) -> None:
        for key, value in fields.items():
            self._called(f"{key}={value}" if key != "Comment" else "Comment")
            if key == "Comment":
                self.record = dataclasses.replace(self.record, comment=value)


def held(**changes: Any) -> JobRecord:
    return dataclasses.replace(recorded("job-held.txt"), **changes)


FAILED = "launch_failed_requeued_held"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (held(comment=f"mine {MARK}"), Trouble.ORPHAN),
        (held(comment="mine"), Trouble.NONE),  # somebody's own hold
        (held(comment=f"mine {MARK}", priority=10, reason="Priority"), Trouble.NONE),
        (held(comment=str(Marks("mine").held_by("a run", 1990.0))), Trouble.NONE),  # still in work
        (held(reason=FAILED, restarts=1), Trouble.LAUNCH_FAILED),
        (held(reason="launch failed requeued held", restarts=1), Trouble.LAUNCH_FAILED),
        (held(reason="JobHoldMaxRequeue", restarts=5), Trouble.LAUNCH_FAILED),
        (held(reason="JobHeldAdmin", restarts=0), Trouble.HELD),
        (held(reason="JobHeldAdmin", restarts=1), Trouble.LAUNCH_FAILED),
        (held(reason="BadConstraints"), Trouble.BAD_CONSTRAINTS),
        (held(reason="BeginTime", priority=7, restarts=1, eligible_at=2100.0), Trouble.SLOW),
        (held(reason="BeginTime", priority=7, restarts=1, eligible_at=1990.0), Trouble.SLOW),  # nobody has looked since
        (held(reason="BeginTime", priority=7, restarts=0, eligible_at=2100.0), Trouble.NONE),  # the user's --begin
        (held(reason="BeginTime", priority=7, restarts=1, eligible_at=90000.0), Trouble.NONE),
        (held(reason="BeginTime", restarts=1, state=JobState.COMPLETING), Trouble.NONE),
    ],
)
def test_what_keeps_it(record: JobRecord, expected: Trouble) -> None:
    assert trouble(record, now=2000.0) is expected


def test_an_orphan_is_released_and_loses_the_mark_last() -> None:
    slurm = Controller(held(comment=f"mine {MARK}"))
    (done,) = sweep(slurm, "alice", clock=Clock())  # type: ignore[arg-type]
    assert done.helped
    assert slurm.calls == ["StartTime=now+2", "release", "Comment"]
    assert slurm.record.comment == "mine"


def test_jobs_that_are_not_ours_are_not_touched() -> None:
    slurm = Controller(held(reason=FAILED, restarts=1, comment="mine"))
    assert sweep(slurm, "alice", clock=Clock()) == []  # type: ignore[arg-type]
    assert slurm.calls == []


def test_a_failed_launch_is_released_so_often_and_no_more() -> None:
    slurm = Controller(held(reason=FAILED, restarts=1, comment="mine resilient"))
    for times in range(1, MOST_FREED + 1):
        done = help_job(slurm, slurm.record, clock=Clock())  # type: ignore[arg-type]
        assert done.helped
        assert Marks.read(slurm.record.comment).freed == times
        slurm.record = dataclasses.replace(slurm.record, priority=0, reason=FAILED)
    slurm.calls.clear()
    done = help_job(slurm, slurm.record, clock=Clock())  # type: ignore[arg-type]
    assert not done.helped
    assert "scontrol release" in done.said
    assert slurm.calls == []


def test_an_admins_hold_is_explained() -> None:
    slurm = Controller(held(reason="JobHeldAdmin", restarts=1, comment="resilient"), {"release": NotPermitted("no")})
    done = help_job(slurm, slurm.record, clock=Clock())  # type: ignore[arg-type]
    assert not done.helped
    assert "admin" in done.said


def test_bad_constraints_lose_our_exclusions_only() -> None:
    comment = "mine [slurm-resilience excluded n1 at 1900]"
    slurm = Controller(held(reason="BadConstraints", comment=comment, excluded=("n1", "n2")))
    done = help_job(slurm, slurm.record, clock=Clock())  # type: ignore[arg-type]
    assert done.helped
    assert slurm.calls[0] == "ExcNodeList=n2"
    assert slurm.record.comment == "mine"
    theirs = Controller(held(reason="BadConstraints", comment="mine", excluded=("n2",)))
    done = help_job(theirs, theirs.record, clock=Clock())  # type: ignore[arg-type]
    assert not done.helped
    assert "2 of 4 can be used without n2" in done.said
    assert theirs.calls == []


def watching(slurm: Controller, clock: Clock, **more: Any) -> tuple[Watch, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    watch = Watch(slurm, "alice", tell=lambda job, what, **facts: told.append((job, what)), clock=clock, **more)  # type: ignore[arg-type]
    return watch, told


SLOW = {"reason": "BeginTime", "priority": 7, "restarts": 1, "eligible_at": 2100.0, "comment": "resilient"}


def test_a_slow_job_is_hastened_but_not_in_its_first_second() -> None:
    slurm, clock = Controller(held(**SLOW, state=JobState.COMPLETING)), Clock()
    watch, told = watching(slurm, clock)
    assert watch.round() < 1.0, "it will be in the queue at any moment"
    slurm.record = held(**SLOW)
    for _ in range(3):
        assert watch.round() < 1.0
        clock.now += 0.39
    assert slurm.calls == []
    clock.now += 0.1
    watch.round()
    assert slurm.calls == ["StartTime=now"]
    clock.now += 1.0
    watch.round()
    assert slurm.calls == ["StartTime=now"], "it was asked a second ago"
    clock.now += 1.1
    watch.round()
    assert slurm.calls == ["StartTime=now"] * 2
    slurm.record = held(**{**SLOW, "state": JobState.RUNNING})
    assert watch.round() >= 1.0
    assert [what for _, what in told] == ["expedited"]


def test_a_job_that_cannot_be_hastened_is_given_up_in_words() -> None:
    slurm, clock = Controller(held(**SLOW)), Clock()
    watch, told = watching(slurm, clock)
    for _ in range(40):
        watch.round()
        clock.now += 1.5
    assert slurm.calls == ["StartTime=now"] * 10
    assert [what for _, what in told] == ["cannot_start"]


def test_jobs_of_others_are_left_alone_unless_asked_for() -> None:
    for everything, calls in ((False, []), (True, ["StartTime=now"])):
        slurm, clock = Controller(held(**{**SLOW, "comment": "mine"})), Clock()
        watch, _ = watching(slurm, clock, all_jobs=everything)
        watch.round()
        clock.now += 1.5
        watch.round()
        assert slurm.calls == calls


def test_a_requeue_that_the_controller_forgot_is_made_again() -> None:
    """It was killed before it had saved that; the job then ended, with the code of one that is in the queue."""
    for code, comment, revived in ((75, "resilient", True), (80, "resilient", False), (75, "mine", False)):
        slurm, clock = Controller(held(state=JobState.RUNNING, reason="", priority=7, comment=comment)), Clock()
        watch, told = watching(slurm, clock)
        watch.round()
        slurm.record = dataclasses.replace(slurm.record, state=JobState.FAILED, exit_code=code)
        slurm.gone = True
        watch.round()
        assert slurm.calls == (["requeue"] if revived else [])
        assert [what for _, what in told] == (["released"] if revived else [])


def test_looking_on_changes_nothing() -> None:
    for record in (held(**SLOW), held(comment=f"mine {MARK}")):
        slurm, clock = Controller(record), Clock()
        watch, told = watching(slurm, clock, act=False)
        watch.round()
        clock.now += 1.5
        watch.round()
        assert slurm.calls == []
        assert [what for _, what in told] == ["found"]


def test_a_controller_that_is_away_is_told_once() -> None:
    slurm, clock = Controller(held(**SLOW), {"queue": ControllerUnreachable("away")}), Clock()
    watch, told = watching(slurm, clock)
    watch.round()
    watch.round()
    slurm.refuse.clear()
    watch.round()
    assert [what for _, what in told] == ["no_answer", "answers_again"]
