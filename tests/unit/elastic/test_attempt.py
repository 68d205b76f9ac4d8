"""One attempt's plan, and the outlook on every smaller allocation."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.elastic import AXES, MeshConstraints, Node, plan_attempt, plan_mesh
from slurm_resilience.elastic.allocation import NodeState
from slurm_resilience.elastic.outlook import outlook
from slurm_resilience.errors import ConfigError


def config(**values: object) -> ResilienceConfig:
    return ResilienceConfig.build(values)


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(count)]


KEYS = {"ranks", "nodes", "ranks_per_node", "mesh", "global_batch", "micro_batch", "accumulation", "samples_per_dp_rank"}
KEYS |= {"lr_factor", "spares", "spare_gpus", "left_out", "reason"}


def test_the_seed_example_as_a_plan() -> None:
    wanted = config(nodes="1-8", ranks_per_node=8, global_batch=2048, micro_batch=4, mesh={"tp": 4})
    full, less = plan_attempt(names(8), 8, wanted), plan_attempt(names(6), 8, wanted)
    assert set(full) == KEYS
    assert json.loads(json.dumps(less)) == less
    assert (full["ranks"], full["mesh"]["dp_shard"], full["accumulation"]) == (64, 16, 32)
    assert (less["ranks"], less["mesh"]["dp_shard"], less["accumulation"]) == (48, 12, 43)
    assert full["samples_per_dp_rank"] == [128] * 16
    assert sum(less["samples_per_dp_rank"]) == 2048
    assert less["lr_factor"] == 1.0


def test_a_node_with_seven_gpus() -> None:
    wanted = config(nodes="1-3", ranks_per_node=8, global_batch=64, mesh={"tp": 4})
    plan = plan_attempt({"a": 8, "b": 7, "c": 8}, 8, wanted)
    assert (plan["nodes"], plan["ranks_per_node"]) == (["a", "b", "c"], [8, 4, 8])
    assert (plan["spares"], plan["spare_gpus"]) == (3, {"b": 3})
    assert "4 used and 3 spare on b" in plan["reason"]


def test_nodes_over_the_maximum_are_spares_and_marked_ones_left_out() -> None:
    nodes = [Node("a", 2), Node("b", 2, NodeState.DRAINED), Node("c", 2), Node("d", 2)]
    plan = plan_attempt(nodes, 2, config(nodes="1-2", ranks_per_node=2))
    assert (plan["nodes"], plan["spare_gpus"], plan["left_out"]) == (["a", "c"], {"d": 2}, {"b": "drained"})
    assert (plan["global_batch"], plan["micro_batch"], plan["accumulation"], plan["samples_per_dp_rank"]) == (
        None,
        None,
        1,
        None,
    )


def test_a_micro_batch_nobody_chose_stays_when_nodes_are_lost() -> None:
    wanted = config(nodes="1-4", ranks_per_node=1, global_batch=32)
    plans = {count: plan_attempt(names(count), 1, wanted) for count in (4, 3, 2, 1)}
    assert {plan["micro_batch"] for plan in plans.values()} == {8}
    assert {count: plan["accumulation"] for count, plan in plans.items()} == {4: 1, 3: 2, 2: 2, 1: 4}


def test_a_micro_batch_nobody_chose_stays_when_the_largest_node_is_lost() -> None:
    wanted = config(nodes="1-2", ranks_per_node=4, global_batch=48)
    both = plan_attempt([Node("a", 2), Node("b", 4)], 4, wanted)
    small = plan_attempt([Node("a", 2)], 4, wanted, previous=both["mesh"])
    assert both["micro_batch"] == small["micro_batch"] == 6
    assert (both["accumulation"], small["accumulation"]) == (2, 4)
    assert "changed: dp_shard 6 to 2" in small["reason"]


def test_a_micro_batch_nobody_chose_is_counted_in_data_parallel_ranks() -> None:
    """Two tensor parallel ranks share their samples: four nodes of two GPUs are four ranks with samples of their own."""
    wanted = config(nodes="1-4", ranks_per_node=2, global_batch=32, mesh={"tp": 2})
    assert [plan_attempt(names(count), 2, wanted)["micro_batch"] for count in (4, 3, 1)] == [8, 8, 8]


def test_a_whole_spare_node_has_no_ranks_and_is_not_listed() -> None:
    plan = plan_attempt(names(3), 2, config(nodes="1-3", ranks_per_node=2, mesh={"pp": 4}))
    assert (plan["nodes"], plan["ranks_per_node"], plan["spare_gpus"]) == (["n0", "n1"], [2, 2], {"n2": 2})


def test_the_reason_tells_of_suspects_and_of_nobody_else() -> None:
    nodes = [Node("a", 2), Node("b", 2, suspect="slow"), Node("c", 2)]
    spared = plan_attempt(nodes, 2, config(nodes="1-2", ranks_per_node=2))["reason"]
    assert spared.endswith("b is spare, a suspect: slow")
    assert spared.count("suspect") == 1
    used = plan_attempt(nodes, 2, config(nodes=3, ranks_per_node=2))["reason"]
    assert used.endswith("b is used though a suspect: slow")
    assert used.count("suspect") == 1


def test_the_mesh_of_the_attempt_before_is_kept_where_another_is_as_good() -> None:
    wanted = config(nodes=1, ranks_per_node=8, mesh={"tp": "/4"})
    before = dict.fromkeys(AXES, 1) | {"dp_shard": 2, "tp": 4}
    plan = plan_attempt(names(1), 8, wanted, previous=before)
    assert plan["mesh"] == before
    assert plan["reason"].endswith("the mesh of the attempt before")
    assert plan_attempt(names(1), 8, wanted)["mesh"]["tp"] == 1
    sparse = plan_attempt(names(1), 8, wanted, previous={"dp_shard": 2, "tp": 4})["reason"]
    assert sparse.endswith("the mesh of the attempt before"), "an axis that is not named is one"


def test_the_outlook_deals_the_batch_to_replicas_of_shards() -> None:
    prospects = outlook([4, 4, 4], MeshConstraints.of(dp_shard=2), global_batch=12)
    assert [len(one.to_json(list_samples=True)["samples_per_dp_rank"]) for one in prospects] == [12, 8, 4]


def test_more_gpus_than_samples_leaves_spares() -> None:
    plan = plan_attempt(["a"], 8, config(nodes=1, ranks_per_node=3, global_batch=3))
    assert (plan["ranks"], plan["spares"]) == (3, 5)
    assert plan["samples_per_dp_rank"] == [1, 1, 1]


def test_scaling_is_an_explicit_choice() -> None:
    wanted = config(nodes="1-4", ranks_per_node=1, global_batch=32, micro_batch=4)
    plan = plan_attempt(names(3), 1, wanted, scale="linear")
    assert (plan["global_batch"], plan["accumulation"], plan["lr_factor"]) == (24, 2, 0.75)
    assert plan_attempt(names(4), 1, wanted, scale="linear")["lr_factor"] == 1.0


def test_a_refusal_names_the_smallest_change() -> None:
    wanted = config(nodes="1-4", ranks_per_node=2, mesh={"tp": 2, "pp": 2})
    with pytest.raises(ConfigError, match="pp 1 instead of 2, or tp 1 instead of 2, or 1 more node of 2 GPUs"):
        plan_attempt(names(1), 2, wanted)


@pytest.mark.parametrize(
    ("mesh", "words"), [({"tpp": 4}, "did you mean 'tp'"), ({"tp": "four"}, "no constraint"), ({"tp": 0}, "no degree")]
)
def test_nonsense_in_the_mesh_section_is_refused(mesh: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(mesh=mesh)


def test_the_mesh_section_counts_only_data_parallel_ranks_against_the_batch() -> None:
    assert config(nodes=4, ranks_per_node=8, mesh={"tp": "8"}, global_batch=4).mesh.tp == 8
    with pytest.raises(ConfigError, match="4 ranks"):
        config(nodes=4, ranks_per_node=8, mesh={"tp": 8}, global_batch=3)


@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(1, 9))
def test_any_allocation_keeps_the_batch_and_idles_nobody(nodes: int, gpus: int, tp: int, batch: int, micro: int) -> None:
    class Wanted:
        nodes = (1, 12)
        global_batch = batch
        micro_batch = min(micro, batch)
        mesh = config(mesh={"tp": tp}).mesh

    if tp > gpus:
        with pytest.raises(ConfigError):
            plan_attempt(names(nodes), gpus, Wanted())
        return
    plan = plan_attempt(names(nodes), gpus, Wanted())
    samples = plan["samples_per_dp_rank"]
    assert sum(samples) == plan["global_batch"] == batch
    assert min(samples) >= 1
    assert max(samples) - min(samples) <= 1
    assert sum(plan["ranks_per_node"]) == plan["ranks"] == len(samples) * tp
    assert plan["ranks"] + plan["spares"] == nodes * gpus


def test_every_smaller_allocation_is_the_plan_of_that_allocation() -> None:
    nodes = [8, 8, 7, 8, 4, 8]
    rules = MeshConstraints.of(tp=4, dp_shard="<=4")
    prospects = outlook(nodes, rules, global_batch=100, micro_batch=3)
    assert [prospect.nodes for prospect in prospects] == [6, 5, 4, 3, 2, 1]
    for prospect in prospects:
        alone = plan_mesh(gpus_per_node=nodes[: prospect.nodes], constraints=rules, max_dp=100, previous=prospects[0].mesh)
        assert prospect.mesh == alone.axes
        assert (prospect.ranks, prospect.spares) == (alone.used, alone.spares)
        document = prospect.to_json(list_samples=True)
        assert sum(document["samples_per_dp_rank"]) == 100
        assert sum(count * each for count, each in document["samples"]) == 100
        assert sum(document["weights"]) == pytest.approx(1)
        assert set(document["mesh"]) == set(AXES)


def test_the_outlook_ends_where_no_mesh_fits() -> None:
    prospects = outlook([8] * 6, MeshConstraints.of(tp=8, pp=4))
    assert [prospect.nodes for prospect in prospects] == [6, 5, 4]
    assert [prospect.spares for prospect in prospects] == [16, 8, 0]
    with pytest.raises(ConfigError, match="1 more node"):
        outlook([8] * 3, MeshConstraints.of(tp=8, pp=4))


def test_sixteen_thousand_allocations_in_seconds() -> None:
    before = time.process_time()
    prospects = outlook([8] * 16_384, MeshConstraints.of(tp=4), global_batch=65_536, micro_batch=1)
    assert len(prospects) == 16_384
    assert time.process_time() - before < 8.0
