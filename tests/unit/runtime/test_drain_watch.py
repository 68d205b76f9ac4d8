"""A node is drained under the job: seen within a minute, saved, and left, while the node still works."""

from __future__ import annotations

import pytest

from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime.drain_watch import ASK_EVERY_S, DrainWatch, Move, decide_move
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.outbox import Outbox
from tests.unit.runtime.stage import Clock

BAD = {"n2": "sr:gpu-xid79 g3"}


@pytest.mark.parametrize(
    ("left", "fits", "can_requeue", "room", "what"),
    [
        (["n1", "n3"], True, False, None, "inside"),
        (["n1", "n3"], False, True, 1, "outside"),
        (["n1"], True, True, 1, "outside"),
        (["n1"], True, True, 0, "0 other nodes in service"),
        (["n1"], True, True, None, "does not say"),
        (["n1"], True, False, 5, "cannot be requeued"),
    ],
)
def test_where_to_go(left: list[str], fits: bool, can_requeue: bool, room: int | None, what: str) -> None:
    decided = decide_move(BAD, left, fewest=2, fits=fits, can_requeue=can_requeue, room=room)
    if isinstance(decided, Move):
        assert ("inside" if decided.inside else "outside") == what
        assert decided.nodes == ("n2",)
        assert "sr:gpu-xid79" in decided.reason
    else:
        assert what in decided


class Desk:
    """A watch with a clock; what it puts is taken at once."""

    def __init__(self, policy: str = "checkpoint_and_move", *, asks: bool = True) -> None:
        self.clock = Clock()
        self.out = Outbox(self.clock, History(), restart=0, attempt=1)
        self.watch = DrainWatch(self.out, policy=policy, asks=asks)

    def asked_within(self, seconds: float) -> bool:
        for _ in range(round(seconds)):
            self.clock.pass_(1.0)
            self.out.open()
            self.watch.tick(("n1", "n2"))
            if any(isinstance(each, i.LookAtNodes) for each in self.out.take()):
                return True
        return False

    def told(self, drained: dict[str, str], *, known: bool = True, room: int | None = 3) -> list[str]:
        self.watch.said(i.NodesSeen(drained, known, room))
        return [each.event for each in self.out.take() if isinstance(each, i.Record)]

    def move(self, ready: tuple[str, ...] = (), fewest: int = 1) -> Move | str | None:
        return self.watch.move(("n1", "n2"), ready, fewest=fewest, fits=lambda names: True, can_requeue=True)


def test_it_asks_twice_a_minute_and_never_while_a_question_is_open() -> None:
    desk = Desk()
    assert desk.asked_within(10)
    assert not desk.asked_within(100), "the first question has no answer yet"
    desk.told({})
    assert not desk.asked_within(ASK_EVERY_S - 2)
    assert desk.asked_within(5)


@pytest.mark.parametrize(("policy", "asks"), [("ignore", True), ("checkpoint_and_move", False)])
def test_who_ignores_drains_or_has_no_slurm_asks_nothing(policy: str, asks: bool) -> None:
    assert not Desk(policy, asks=asks).asked_within(200)


def test_a_drain_counts_when_it_was_seen_twice_and_is_over_when_it_is_gone() -> None:
    """A hook that is over its budget takes its own drain back within seconds."""
    desk = Desk()
    assert desk.asked_within(10)
    assert desk.told(BAD) == []
    assert desk.move() is None
    assert desk.asked_within(7), "it looks again soon"
    assert desk.told(BAD) == ["node_drained"]
    assert desk.told(BAD) == []
    assert desk.told({}) == ["node_undrained"]
    assert desk.told(BAD) == []
    assert desk.told({}) == [], "taken back before the second look"


def test_a_slurm_that_does_not_answer_changes_nothing() -> None:
    desk = Desk()
    desk.told(BAD)
    desk.told(BAD)
    assert desk.told({}, known=False) == []
    assert desk.watch.drained == BAD


def test_it_moves_once_and_says_once_why_it_stays() -> None:
    desk = Desk()
    desk.told(BAD)
    desk.told(BAD, room=0)
    assert isinstance(desk.move(fewest=2), str)
    assert desk.move(fewest=2) is None
    desk.told(BAD, room=0)
    assert desk.move(fewest=2) is None, "nothing new"
    desk.told(BAD, room=1)
    decided = desk.move(fewest=2)
    assert isinstance(decided, Move)
    assert not decided.inside
    assert desk.move(fewest=2) is None


def test_a_spare_takes_the_place_of_a_drained_node() -> None:
    desk = Desk()
    desk.told(BAD)
    desk.told(BAD)
    decided = desk.move(ready=("n3",), fewest=2)
    assert isinstance(decided, Move)
    assert decided.inside
    assert desk.watch.without_drained(("n1", "n2", "n3"), fewest=2, can_requeue=True) == ("n1", "n3")


@pytest.mark.parametrize(
    ("fewest", "can_requeue", "room", "names"),
    [(1, False, None, ("n1",)), (2, True, 3, ("n1",)), (2, True, 0, ("n1", "n2")), (2, False, 3, ("n1", "n2"))],
)
def test_a_drained_node_is_used_only_where_it_cannot_be_done_without(
    fewest: int, can_requeue: bool, room: int | None, names: tuple[str, ...]
) -> None:
    desk = Desk()
    desk.told(BAD)
    desk.told(BAD, room=room)
    assert desk.watch.without_drained(("n1", "n2"), fewest=fewest, can_requeue=can_requeue) == names


def test_the_policy_warn_says_it_and_stays() -> None:
    desk = Desk("warn")
    desk.told(BAD)
    assert desk.told(BAD) == ["node_drained"]
    assert desk.move() is None
    assert desk.watch.without_drained(("n1", "n2"), fewest=1, can_requeue=True) == ("n1", "n2")


def test_a_node_that_is_drained_again_and_again_is_not_taken_back() -> None:
    desk = Desk()
    for _ in range(2):
        desk.told(BAD)
        desk.told(BAD)
        assert isinstance(desk.move(), Move)
        desk.told({})
    assert desk.watch.without_drained(("n1", "n2"), fewest=1, can_requeue=True) == ("n1",)
