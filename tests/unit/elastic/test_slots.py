"""Slurm's ways to speak of GPUs and tasks, read exactly; what cannot be read is not guessed."""

from __future__ import annotations

import pytest

from slurm_resilience.elastic.slots import slots_per_node
from slurm_resilience.errors import ConfigError, SlurmError
from slurm_resilience.slurm.environment import SlurmEnvironment, tasks_per_node
from slurm_resilience.slurm.gpus import gpus_in


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu", 1),
        ("gpu:a100", 1),
        ("gpu:a100:4", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:4(IDX:0-1,3,5)", 4),
        ("gpu:a100:2(S:0),gpu:v100:2(S:1)", 4),
        ("gpu:4,shard:16", 4),
        ("gres/gpu:2", 2),
        ("gres:gpu:h100:3", 3),
        ("cpu=8,gres/gpu=1", 1),
        ("gres/gpu=8,gres/gpu:a100=8", 8),
        ("gres/gpu:a100=4,gres/gpu:v100=2", 6),
        ("billing=5,cpu=64,mem=500G,node=1", None),
        ("shard:8", None),
        ("", None),
        ("(null)", None),
        ("gpu:0", 0),
        pytest.param("gpu:" + "9" * 5000, None, id="5000 digits"),
    ],
)
def test_gpus_are_read_from_every_dialect(text: str, gpus: int | None) -> None:
    assert gpus_in(text) == gpus


@pytest.mark.parametrize(("text", "gpus"), [("8", 8), ("a100:4", 4), ("a100:2,v100:2", 4), ("gpu:2", 2), ("", None)])
def test_in_a_gpu_option_the_word_gpu_is_left_out(text: str, gpus: int | None) -> None:
    assert gpus_in(text, bare=True) == gpus


def environment(**values: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", **values}


def test_heterogeneous_tasks_and_names_with_gaps() -> None:
    where = SlurmEnvironment.current(
        environment(SLURM_JOB_NODELIST="gpu[001-003,007],login-a", SLURM_TASKS_PER_NODE="4(x2),3,2(x2)")
    )
    assert where is not None
    slots = slots_per_node(where.nodes, tasks=where.tasks_per_node)
    assert slots == {"gpu001": 4, "gpu002": 4, "gpu003": 3, "gpu007": 2, "login-a": 2}


def test_counts_of_another_allocation_are_not_believed() -> None:
    where = SlurmEnvironment.current(environment(SLURM_JOB_NODELIST="n[1-2]", SLURM_TASKS_PER_NODE="4(x2),3"))
    assert where is not None
    assert where.tasks_per_node is None
    assert slots_per_node(where.nodes, tasks=where.tasks_per_node, ranks_per_node=4) == {"n1": 4, "n2": 4}
    with pytest.raises(ConfigError, match="3 counts of tasks for 2 nodes"):
        slots_per_node(where.nodes, tasks=(4, 4, 3))


def test_one_node_jobs_and_array_tasks_are_plain_allocations() -> None:
    where = SlurmEnvironment.current(
        environment(SLURM_JOB_NODELIST="n7", SLURM_TASKS_PER_NODE="2", SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="3")
    )
    assert where is not None
    assert where.job_id == "6_3"
    assert slots_per_node(where.nodes, tasks=where.tasks_per_node) == {"n7": 2}


def test_gpus_win_over_tasks_and_are_shared_by_gpus_per_task() -> None:
    both = environment(SLURM_GPUS_PER_NODE="a100:8", SLURM_GPUS_PER_TASK="2")
    assert slots_per_node(["a", "b"], environment=both, tasks=(1, 1)) == {"a": 4, "b": 4}
    newer = environment(SLURM_GPUS_PER_NODE="8", SLURM_TRES_PER_TASK="cpu=4,gres/gpu=4")
    assert slots_per_node(["a"], environment=newer) == {"a": 2}


@pytest.mark.parametrize(
    ("text", "slots"), [("4(x2),3", [4, 4, 3]), ("8,8,7", [8, 8, 7]), ("4(x3)", [4, 4, 4]), ("a100:2,v100:2", [4, 4, 4])]
)
def test_gpus_may_be_listed_node_by_node(text: str, slots: list[int]) -> None:
    assert list(slots_per_node("abc", environment=environment(SLURM_GPUS_PER_NODE=text)).values()) == slots


def test_a_list_of_gpus_that_is_not_about_these_nodes_is_not_believed() -> None:
    stale = environment(SLURM_GPUS_PER_NODE="4(x2),3")
    assert slots_per_node(["a", "b"], environment=stale, ranks_per_node=2) == {"a": 2, "b": 2}


@pytest.mark.parametrize("text", ["9" * 5000, "8(x" + "9" * 5000 + ")", "4(x2),٣"], ids=["tasks", "nodes", "other digits"])
def test_counts_that_cannot_be_numbers_are_an_error_of_ours(text: str) -> None:
    with pytest.raises(SlurmError, match="not a list of tasks per node"):
        tasks_per_node(text)
    assert slots_per_node(["a"], environment=environment(SLURM_GPUS_PER_NODE="4", SLURM_NTASKS_PER_GPU=text)) == {"a": 4}


def test_tasks_that_share_a_gpu_are_counted() -> None:
    shared = environment(SLURM_NTASKS_PER_GPU="2")
    assert slots_per_node(["a", "b"], environment=shared, gpus={"a": 4, "b": 1}) == {"a": 8, "b": 2}


def test_counted_gpus_win_over_what_was_asked_for() -> None:
    asked = environment(SLURM_GPUS_PER_NODE="8")
    assert slots_per_node(["a", "b"], gpus={"b": 7}, environment=asked) == {"a": 8, "b": 7}
    assert slots_per_node(["a", "b"], gpus={"a": 3, "b": 8}, ranks_per_node=4) == {"a": 3, "b": 4}
    pairs = environment(SLURM_GPUS_PER_TASK="8")
    assert slots_per_node(["a", "b"], gpus={"a": 0, "b": 8}, environment=pairs) == {"a": 0, "b": 1}


def test_nothing_known_is_an_error_not_a_guess() -> None:
    with pytest.raises(ConfigError, match="Nobody can tell how many ranks node a can hold"):
        slots_per_node(["a"], environment={})


def test_a_task_larger_than_any_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="A task needs 16 GPUs"):
        slots_per_node(["a", "b"], environment=environment(SLURM_GPUS_PER_NODE="8", SLURM_GPUS_PER_TASK="16"))
