"""A node that crashes follow is left out where enough others are, and comes back with its next boot."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import Cause
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.inputs import Forgiven
from slurm_resilience.runtime.states import State
from slurm_resilience.runtime.suspects import speaks_of_node, suspects
from tests.unit.runtime.stage import Stage


@pytest.mark.parametrize(
    ("crashes", "named"),
    [
        ({}, []),
        ({"n1": 1}, []),
        ({"n1": 2}, ["n1"]),
        ({"n1": 2, "n2": 1}, ["n1"]),
        ({"n1": 3, "n2": 2}, []),
        ({"n1": 2, "n2": 2}, []),
    ],
)
def test_a_suspect_has_twice_as_many_crashes_as_any_other(crashes: dict[str, int], named: list[str]) -> None:
    assert sorted(suspects(crashes)) == named


@pytest.mark.parametrize(
    ("cause", "signature", "counts"),
    [("rank_crash", "", True), ("rank_crash", "ValueError: x at step 3", False), ("hang", "", True), ("node_lost", "", False),
     ("rank_crash", "RuntimeError: CUDA error: uncorrectable ECC error at step 9", True), ("preemption", "", False)],
)  # fmt: skip
def test_an_exception_of_the_code_is_not_held_against_the_node(cause: str, signature: str, counts: bool) -> None:
    assert speaks_of_node(cause, signature) is counts


def crash(stage: Stage, node: str, step: int) -> None:
    stage.until(State.RUNNING)
    stage.fact(node, 0, "checkpoint_committed", step=step)
    stage.kill_rank(node)
    stage.pass_(0.5)


def test_a_node_that_crashes_twice_is_left_out_though_progress_was_made_and_a_spare_comes_in() -> None:
    stage = Stage(4, nodes=(3, 3), spares=1).running()
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"]
    crash(stage, "n2", 5)
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"], "once is nothing"
    crash(stage, "n2", 10)
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n1", "n3", "n4"]
    reason = next(event["reason"] for event in reversed(stage.events) if event["event"] == "decided")
    assert "n4 in place of n2" in reason
    assert "n2 is left out: 2 crashes began there, and none elsewhere" in reason


def test_a_suspect_is_used_where_the_fewest_need_it() -> None:
    stage = Stage(3, nodes=(3, 3)).running()
    crash(stage, "n2", 5)
    crash(stage, "n2", 10)
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"]
    assert "n2 is needed though 2 crashes began there" in stage.last("decided")["reason"]


def test_an_elastic_run_does_not_take_it_back_at_the_next_checkpoint() -> None:
    stage = Stage(3, nodes=(1, 3)).running()
    crash(stage, "n2", 5)
    crash(stage, "n2", 10)
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n1", "n3"]
    stage.fact("n1", 0, "checkpoint_committed", step=15)
    stage.pass_(2.0)
    assert stage.coordinator.state is State.RUNNING


def test_its_user_takes_it_back_and_it_comes_in_at_the_next_checkpoint() -> None:
    stage = Stage(3, nodes=(1, 3)).running()
    crash(stage, "n2", 5)
    crash(stage, "n2", 10)
    stage.until(State.RUNNING)
    stage.tell(Forgiven("n2"))
    assert stage.last("node_forgiven")["node"] == "n2"
    stage.fact("n1", 0, "checkpoint_committed", step=15)
    stage.pass_(0.5)
    stage.finish_ranks("n1", "n3", done=False, fact="stopped")
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"]


def test_pretend_nodes_are_one_machine_and_no_suspects() -> None:
    history = History()
    history.apply({"event": "allocation_started", "job_id": "local"})
    for attempt in (1, 2):
        history.apply({"event": "attempt_stopped", "attempt": attempt, "fault": True, "cause": "rank_crash", "node": "n1"})
    assert history.suspects == {}
    history.apply({"event": "allocation_started", "job_id": "7"})
    assert list(history.suspects) == ["n1"]


def test_it_is_told_to_the_next_allocation() -> None:
    stage = Stage(3, nodes=(2, 2), spares=1).running()
    crash(stage, "n1", 5)
    crash(stage, "n1", 10)
    stage.until(State.RUNNING)
    stage.slurm_says(Cause.PREEMPTION, PreemptTime="2027-01-15T08:00:00")
    stage.warn()
    stage.finish_ranks("n2", "n3", done=False, fact="stopped")
    stage.until(State.LEAVING)
    stage.pass_(8.0)
    assert stage.requeues[-1].suspects == ("n1",)


def test_a_spare_takes_the_place_of_a_lost_node_and_the_mesh_stays() -> None:
    stage = Stage(4, nodes=(3, 3), spares=1).running()
    mesh = stage.last("attempt_started")["plan"]["mesh"]
    stage.power_off("n2")
    stage.pass_(5.0)
    stage.until(State.RUNNING)
    again = stage.last("attempt_started")
    assert again["nodes"] == ["n1", "n3", "n4"]
    assert again["plan"]["mesh"] == mesh
    assert "n4 in place of n2" in stage.last("decided")["reason"]


def test_a_reboot_clears_a_node() -> None:
    history = History()
    history.apply({"event": "agent_joined", "node": "n1", "boot_id": "a"})
    for attempt in (1, 2):
        history.apply({"event": "attempt_stopped", "attempt": attempt, "fault": True, "cause": "rank_crash", "node": "n1"})
    assert list(history.suspects) == ["n1"]
    history.apply({"event": "agent_joined", "node": "n1", "boot_id": "a"})
    assert list(history.suspects) == ["n1"]
    history.apply({"event": "agent_joined", "node": "n1", "boot_id": "b"})
    assert history.suspects == {}
