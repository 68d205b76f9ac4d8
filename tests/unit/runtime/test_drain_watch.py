"""A node is drained under the job: seen within a minute, saved, and left, while the node still works."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime.drain_watch import ASK_EVERY_S, DrainWatch, Move, decide_move
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.states import State
from tests.unit.runtime.stage import Clock, Stage

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

    def told(self, drained: dict[str, str], *, known: bool = True, room: int | None = 3, untold: str = "") -> list[str]:
        self.watch.said(i.NodesSeen(drained, known, room, untold=frozenset(untold.split())))
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


def test_a_node_that_the_answer_says_nothing_of_stays_what_it_was() -> None:
    desk = Desk()
    assert desk.asked_within(10)
    desk.told(BAD)
    assert desk.told({}, untold="n2") == [], "seen once, and not unseen"
    assert desk.told(BAD) == ["node_drained"]
    assert desk.told({}, untold="n2") == []
    assert desk.watch.drained == BAD
    assert desk.told({}, untold="n1") == ["node_undrained"]


def test_a_node_that_is_gone_and_no_longer_asked_about_stays_drained() -> None:
    desk = Desk()
    assert desk.asked_within(10)
    desk.told(BAD)
    desk.told(BAD)
    desk.clock.pass_(ASK_EVERY_S)
    desk.out.open()
    desk.watch.tick(("n1",))
    assert desk.told({}) == []
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


# --- the whole coordinator ---


def drained(stage: Stage, *names: str, within_s: float = 60.0) -> Stage:
    """Somebody drains these nodes; the ranks are asked to stop within a minute."""
    stage.drained = dict.fromkeys(names, "ADMIN: fan [root@2026-11-30T01:06:35]")
    stage.until(State.ENDING, within_s)
    assert stage.last("node_drained")["node"] in names
    assert stage.last("warning_explained")["cause"] == "node_drained"
    return stage


def saved(stage: Stage) -> None:
    stage.everywhere("stopped", step=10)


def test_the_run_goes_on_without_the_drained_node_in_the_same_allocation() -> None:
    stage = drained(Stage(4, nodes=(2, 4)).running(), "n2")
    orders = stage.agents["n2"].orders
    assert orders[-1].stop
    assert orders[-1].cause == "node_drained"
    saved(stage)
    stage.until(State.RUNNING)
    assert sorted(stage.live_ranks) == ["n1", "n3", "n4"]
    assert stage.last("attempt_stopped") | {"fault": False, "cause": "node_drained", "saved": True} == stage.last(
        "attempt_stopped"
    )
    assert stage.requeues == []
    assert "node_drained" in stage.agents["n1"].launches[-1].header
    stage.everywhere("checkpoint_committed", step=20, path="x")
    stage.pass_(60)
    assert sorted(stage.live_ranks) == ["n1", "n3", "n4"], "it does not grow back onto a drained node"
    stage.drained = {}
    stage.pass_(40)
    stage.everywhere("checkpoint_committed", step=30, path="y")
    saved(stage)
    stage.pass_(10)
    assert sorted(stage.live_ranks) == ["n1", "n2", "n3", "n4"], "in service again"


def test_a_spare_takes_over() -> None:
    stage = drained(Stage(4, nodes=(3, 3)).running(), "n2")
    saved(stage)
    stage.until(State.RUNNING)
    assert sorted(stage.live_ranks) == ["n1", "n3", "n4"]


def test_without_a_spare_the_job_asks_for_a_new_allocation() -> None:
    stage = drained(Stage(4, nodes=(4, 4)).running(), "n2")
    saved(stage)
    stage.pass_(15)
    assert len(stage.requeues) == 1
    assert stage.exit_code == ExitCode.REQUEUED
    assert stage.statuses[-1].cause == "node_drained"


def test_where_there_is_nowhere_to_go_it_saves_and_stays() -> None:
    """A partition that is drained as a whole is about to be worked on: who leaves it now would only wait."""
    stage = Stage(4, nodes=(4, 4)).running()
    stage.room = 0
    stage.drained = dict.fromkeys(stage.names, "maintenance on Friday")
    stage.pass_(120)
    assert stage.coordinator.state is State.RUNNING
    assert stage.count("node_drained") == 4
    assert [event["action"] for event in stage.events if event["event"] == "decided"] == ["launch", "stay"]
    assert [order.save for order in stage.agents["n1"].orders if not order.stop] == [1]
    assert stage.last("decided")["cause"] == "node_drained"


def test_a_drain_that_is_taken_back_within_seconds_disturbs_nobody() -> None:
    stage = Stage(4, nodes=(2, 4)).running()
    stage.drained = {"n2": "sr:gpu over the budget"}
    stage.pass_(5.5)
    stage.drained = {}
    stage.pass_(90)
    assert stage.count("node_drained") == 0
    assert stage.coordinator.state is State.RUNNING


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_by_policy_it_stays(policy: str) -> None:
    stage = Stage(4, nodes=(2, 4), on_drain=policy).running()
    stage.drained = {"n2": "ADMIN"}
    stage.pass_(120)
    assert stage.coordinator.state is State.RUNNING
    assert stage.count("node_drained") == (1 if policy == "warn" else 0)


def test_a_crash_while_the_ranks_save_is_a_crash_and_the_next_launch_leaves_the_node_all_the_same() -> None:
    stage = drained(Stage(4, nodes=(2, 4)).running(), "n2")
    stage.kill_rank("n3")
    stage.until(State.RUNNING)
    assert stage.last("fault_detected")["cause"] == "rank_crash"
    assert sorted(stage.live_ranks) == ["n1", "n3", "n4"]


def test_a_preemption_while_the_ranks_save_is_a_preemption() -> None:
    stage = drained(Stage(4, nodes=(2, 4)).running(), "n2")
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn("SIGTERM")
    saved(stage)
    stage.finish_ranks(fact=None)
    stage.pass_(20)
    assert stage.statuses[-1].cause == "preemption"


def test_a_mesh_that_does_not_fit_on_what_is_left_asks_for_a_new_allocation() -> None:
    stage = drained(Stage(4, nodes=(2, 4), mesh={"pp": 4}).running(), "n2")
    saved(stage)
    stage.pass_(15)
    assert len(stage.requeues) == 1
    assert stage.statuses[-1].cause == "node_drained"


def test_ranks_that_report_nothing_could_save_nothing_and_are_left_alone() -> None:
    stage = Stage(4, nodes=(2, 4))
    stage.begin()
    for agent in stage.agents.values():
        agent.progress = {rank: [-1, 0, 0.1, False, 0.1] for rank in range(4)}
    stage.until(State.RUNNING)
    stage.drained = {"n2": "ADMIN"}
    stage.pass_(120)
    assert stage.count("node_drained") == 1
    assert stage.coordinator.state is State.RUNNING
    for agent in stage.agents.values():
        agent.progress = {}
    stage.until(State.ENDING, 30)


def test_a_run_without_slurm_asks_nobody() -> None:
    stage = Stage(2, has_slurm=False).running()
    stage.pass_(100)
    assert not any(isinstance(each, i.LookAtNodes) for each in stage.outputs)
