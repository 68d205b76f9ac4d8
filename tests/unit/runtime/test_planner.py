"""Nodes that are not alike: each agent gets as many ranks as its node can hold, and the attempt before steers the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause, ConfigError, ExitCode
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.planner import Placement, check_fit, fewest_that_fit, look_at, place
from slurm_resilience.runtime.policy import decide_misfit
from tests.unit.runtime.stage import Stage


def config(**values: Any) -> ResilienceConfig:
    return ResilienceConfig.build({"nodes": (1, 4), "ranks_per_node": 8, **values})


def uneven(count: int, gpus: dict[str, int], *, request: dict[str, str] | None = None, **values: Any) -> Stage:
    spec = {"gpus": gpus, "gpu_request": request or {}}
    return Stage(count, spec=spec, **{"ranks_per_node": 8, "global_batch": 48, "micro_batch": 4, **values})


def passes(stage: Stage, condition: Callable[[], bool], within_s: float = 120.0) -> None:
    """Let the stage's time pass until something is so."""
    for _ in range(round(within_s * 10)):
        if condition():
            return
        stage.pass_(0.1)
    raise AssertionError(stage.names_of_events())


def test_each_agent_gets_as_many_ranks_as_the_job_has_gpus_there() -> None:
    stage = uneven(2, {"n1": 2, "n2": 4}).running()
    assert stage.live_ranks == {"n1": [0, 1], "n2": [2, 3, 4, 5]}
    first, second = (stage.agents[name].launches[-1] for name in ("n1", "n2"))
    assert (first.world, second.world) == (6, 6)
    assert first.ranks == [[0, 0], [1, 1]]
    assert second.ranks == [[2, 0], [3, 1], [4, 2], [5, 3]]
    assert (first.group_rank, second.group_rank, second.groups) == (0, 1, 2)


def test_the_event_of_an_attempt_says_which_nodes_ranks_and_spares_and_why() -> None:
    stage = uneven(3, {"n1": 4, "n2": 3, "n3": 4}, mesh={"tp": 2}).running()
    plan = stage.last("attempt_started")["plan"]
    assert (plan["nodes"], plan["ranks_per_node"], plan["ranks"]) == (["n1", "n2", "n3"], [4, 2, 4], 10)
    assert (plan["mesh"]["tp"], plan["mesh"]["dp_shard"]) == (2, 5)
    assert (plan["spares"], plan["spare_gpus"]) == (1, {"n2": 1})
    assert "2 used and 1 spare on n2" in plan["reason"]


def test_the_larger_node_is_lost_and_the_smaller_one_goes_on_with_the_same_micro_batch() -> None:
    stage = uneven(2, {"n1": 2, "n2": 4}, micro_batch=None).running()
    before = stage.last("attempt_started")["plan"]
    stage.power_off("n2")
    passes(stage, lambda: stage.count("attempt_started") == 2)
    assert stage.agents["n1"].ranks == [0, 1]
    after = stage.last("attempt_started")["plan"]
    assert (after["nodes"], after["ranks_per_node"], after["ranks"]) == (["n1"], [2], 2)
    assert after["micro_batch"] == before["micro_batch"]
    assert (after["global_batch"], sum(after["samples_per_dp_rank"])) == (48, 48)
    assert "changed: dp_shard 6 to 2" in after["reason"]


def test_the_mesh_before_steers_the_next_one() -> None:
    """Two unbounded axes: only the history knows that replicas were two."""
    history = History()
    plan = {"mesh": {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 1}}
    history.apply({"event": "attempt_started", "attempt": 1, "nodes": ["n1"], "world": 8, "plan": plan})
    mesh = {"dp_replicate": "any", "dp_shard": "any"}
    told = Stage(2, history=history, attempt=1, ranks_per_node=4, mesh=mesh).running().last("attempt_started")["plan"]
    fresh = Stage(2, ranks_per_node=4, mesh=mesh).running().last("attempt_started")["plan"]
    assert (told["mesh"]["dp_replicate"], told["mesh"]["dp_shard"]) == (2, 4)
    assert "the mesh of the attempt before" in told["reason"]
    assert (fresh["mesh"]["dp_replicate"], fresh["mesh"]["dp_shard"]) == (1, 8)


def test_over_the_maximum_the_larger_nodes_are_used_and_among_equals_those_of_before() -> None:
    two = config(nodes=(1, 2))
    plan = place(look_at(["n1", "n2", "n3"], two, gpus={"n1": 2, "n2": 4, "n3": 4}), two).plan
    assert (plan["nodes"], plan["ranks_per_node"], plan["spare_gpus"]) == (["n2", "n3"], [4, 4], {"n1": 2})
    equals = [f"n{number}" for number in range(1, 5)]
    assert place(equals, config(nodes=(1, 2)), before=("n4", "n2")).nodes == ("n2", "n4")


def test_gpus_per_task_and_tasks_per_gpu_shape_the_ranks() -> None:
    def ranks(request: dict[str, str]) -> list[int]:
        nodes = look_at(["a", "b"], config(), gpus={"a": 4, "b": 2}, gpu_request=request)
        return list(place(nodes, config()).plan["ranks_per_node"])

    assert ranks({}) == [4, 2]
    assert ranks({"SLURM_GPUS_PER_TASK": "2"}) == [2, 1]
    assert ranks({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}) == [2, 1]
    assert ranks({"SLURM_NTASKS_PER_GPU": "2"}) == [8, 4]


def test_a_job_without_gpus_has_the_configured_ranks_everywhere() -> None:
    assert place(look_at(["a", "b"], config()), config()).plan["ranks_per_node"] == [8, 8]


def test_a_suspect_is_used_only_where_the_fewest_need_it_and_that_is_said() -> None:
    nodes = look_at(["a", "b", "c"], config(ranks_per_node=1), suspects={"a": "two crashes"})
    spared = place(nodes, config(ranks_per_node=1)).plan
    assert (spared["nodes"], spared["spare_gpus"]) == (["b", "c"], {"a": 1})
    assert "a is spare, a suspect: two crashes" in spared["reason"]
    needed = place(nodes, config(ranks_per_node=1, nodes=(3, 3))).plan
    assert needed["nodes"] == ["a", "b", "c"]
    assert "a is used though a suspect: two crashes" in needed["reason"]


def test_where_the_mesh_does_not_fit_on_what_is_left_a_new_allocation_is_asked_for() -> None:
    stage = uneven(2, {"n1": 2, "n2": 4}, mesh={"tp": 4}).running()
    assert stage.live_ranks == {"n2": [0, 1, 2, 3]}
    stage.power_off("n2")
    passes(stage, lambda: bool(stage.requeues))
    (requeue,) = stage.requeues
    assert "n2" in requeue.lost
    assert "what is left is too little" in stage.last("decided")["reason"]


def test_a_mesh_that_never_fitted_is_a_mistake_of_the_configuration() -> None:
    whole = decide_misfit("no mesh", None, lost=False, can_requeue=True)
    assert (whole.action, whole.exit_code) == ("stop", ExitCode.CONFIG_ERROR)
    assert decide_misfit("no mesh", Cause.RANK_CRASH, lost=True, can_requeue=True).cause is Cause.NODE_LOST
    assert decide_misfit("no mesh", Cause.NODE_LOST, lost=True, can_requeue=False).action == "stop"


def test_a_minimum_below_what_the_mesh_needs_is_refused_before_anything_starts() -> None:
    large = {"ranks_per_node": 8, "mesh": {"tp": 8, "pp": 3}}
    assert fewest_that_fit(config(nodes=(1, 6), **large), 6) == 3
    with pytest.raises(ConfigError, match="does not fit on fewer than 3 nodes") as caught:
        check_fit(config(nodes=(2, 6), **large))
    assert "--nodes 3-6" in caught.value.remedy
    check_fit(config(nodes=(3, 6), **large))
    with pytest.raises(ConfigError, match="No mesh"):
        check_fit(config(nodes=(1, 2), **large))


def test_a_plan_of_an_event_gives_the_placement_back() -> None:
    made = place(look_at(["a", "b"], config(), gpus={"a": 2, "b": 4}), config())
    again = Placement.of_plan(made.plan)
    assert again == made
    assert again.node_of() == {0: "a", 1: "a", 2: "b", 3: "b", 4: "b", 5: "b"}
