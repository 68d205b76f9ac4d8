"""The best feasible mesh, brute force beside it; refusals that say what would help."""

from __future__ import annotations

import itertools
from collections import Counter
from math import lcm, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.elastic import AXES, Axis, MeshConstraints, plan_mesh, promising
from slurm_resilience.elastic.mesh import MeshFitter
from slurm_resilience.errors import ConfigError

LONG = "9" * 5000  # more digits than int() takes
WORLD = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def mesh(**degrees: int) -> dict[str, int]:
    return {name: degrees.get(name, 1) for name in AXES}


@pytest.mark.parametrize(
    ("gpus", "dp", "used", "spares"), [(64, 16, 64, 0), (48, 12, 48, 0), (47, 11, 44, 3), (4, 1, 4, 0), (63, 15, 60, 3)]
)
def test_the_seed_example(gpus: int, dp: int, used: int, spares: int) -> None:
    plan = plan_mesh(gpus, MeshConstraints.of(tp=4), gpus_per_node=8)
    assert plan.axes == mesh(tp=4, dp_shard=dp)
    assert (plan.used, plan.spares) == (used, spares)
    assert sum(plan.used_per_node) == used
    assert (f"{spares} spare" in plan.reason) == (spares > 0)


def test_a_node_with_seven_usable_gpus_gives_four_and_says_so() -> None:
    plan = plan_mesh(gpus_per_node=[8, 7, 8], constraints=MeshConstraints.of(tp=4))
    assert plan.used_per_node == (8, 4, 8)
    assert plan.spares_per_node == (0, 3, 0)
    assert "3 spare: 3 because groups of 4 stay inside a node" in plan.reason


def test_tp_may_cross_nodes_only_when_told() -> None:
    with pytest.raises(ConfigError, match='tp across nodes \\("16,out"\\)'):
        plan_mesh(gpus_per_node=[8] * 4, constraints=MeshConstraints.of(tp=16))
    plan = plan_mesh(gpus_per_node=[8] * 4, constraints=MeshConstraints.of(tp="16,out"))
    assert plan.axes == mesh(tp=16, dp_shard=2)


def test_a_fixed_shard_lets_replication_shrink() -> None:
    rules = MeshConstraints.of(dp_shard=8)
    assert plan_mesh(64, rules, gpus_per_node=8).axes == mesh(dp_shard=8, dp_replicate=8)
    assert plan_mesh(50, rules, gpus_per_node=8).axes == mesh(dp_shard=8, dp_replicate=6)


def test_a_shard_inside_a_node_takes_the_most_gpus() -> None:
    rules = MeshConstraints.of(dp_shard={"inside_node": True})
    assert plan_mesh(gpus_per_node=[8, 8], constraints=rules).axes == mesh(dp_shard=8, dp_replicate=2)
    assert plan_mesh(gpus_per_node=[8, 6], constraints=rules).axes == mesh(dp_shard=2, dp_replicate=7)


def test_pipeline_stays_and_data_parallel_shrinks() -> None:
    rules = MeshConstraints.of(pp=4, tp=8)
    assert plan_mesh(128, rules, gpus_per_node=8).axes == mesh(pp=4, tp=8, dp_shard=4)
    assert plan_mesh(120, rules, gpus_per_node=8).axes == mesh(pp=4, tp=8, dp_shard=3)


def test_experts_divide_shard_times_context() -> None:
    assert plan_mesh(48, MeshConstraints.of(ep=8)).axes == mesh(dp_shard=48, ep=8)
    assert plan_mesh(47, MeshConstraints.of(ep=8)).axes == mesh(dp_shard=40, ep=8)
    assert plan_mesh(48, MeshConstraints.of(ep=8, cp=4)).axes == mesh(dp_shard=12, cp=4, ep=8)
    assert plan_mesh(10, MeshConstraints.of(ep="/8")).axes == mesh(dp_shard=10, ep=2)


def test_of_equally_large_meshes_the_one_with_fewest_changes_wins() -> None:
    rules = MeshConstraints.of(tp="/8", dp_shard="<=8")
    for previous in (mesh(tp=2, dp_shard=8, dp_replicate=2), mesh(tp=8, dp_shard=4), mesh(dp_shard=8, dp_replicate=4)):
        assert plan_mesh(32, rules, gpus_per_node=8, previous=previous).axes == previous


def test_more_gpus_count_more_than_fewer_changes() -> None:
    rules = MeshConstraints.of(tp="/4")
    assert plan_mesh(47, rules, gpus_per_node=8, previous=mesh(tp=4, dp_shard=12)).axes == mesh(dp_shard=47)


def test_no_rank_without_a_sample() -> None:
    plan = plan_mesh(64, MeshConstraints.of(tp=4), gpus_per_node=8, max_dp=10)
    assert plan.axes == mesh(tp=4, dp_shard=10)
    assert plan.spares == 24
    assert "a global batch of 10 has no sample for more" in plan.reason
    assert plan.used_per_node == (8, 8, 8, 8, 8, 0, 0, 0)


axes = st.one_of(
    st.integers(1, 4).map(Axis.of),
    st.builds(lambda low, more: Axis(at_least=low, at_most=low + more), st.integers(1, 3), st.integers(0, 4)),
    st.sampled_from([Axis(divides=n) for n in (2, 4, 6, 12)]),
)
inside = st.sampled_from([None, True, False])


@st.composite
def rules(draw: st.DrawFn) -> MeshConstraints:
    chosen: dict[str, Axis] = {}
    for name in ("pp", "cp", "tp", "ep", "dp_shard", "dp_replicate"):
        if draw(st.booleans()):
            axis = draw(axes)
            chosen[name] = Axis(axis.fixed, axis.at_least, axis.at_most, axis.divides, draw(inside))
    return MeshConstraints(**chosen)


def brute_force(wanted: MeshConstraints, nodes: list[int], max_dp: int | None) -> int:
    """Most ranks of any mesh, by trying all of them."""
    total, best = sum(nodes), 0
    first = next((i for i, name in enumerate(WORLD) if wanted.inside_node(name)), len(WORLD))
    ranges = [[n for n in range(1, total + 1) if wanted.axis(name).allows(n)] for name in WORLD]
    for degrees in itertools.product(*ranges):
        used, group = prod(degrees), degrees[2] * degrees[3]
        if used <= best or (max_dp is not None and degrees[1] * degrees[2] > max_dp):
            continue
        for expert in range(1, group + 1):
            block = lcm(prod(degrees[first:]), expert * degrees[4] if wanted.inside_node("ep") else 1)
            fits = used <= sum(size // block for size in nodes) * block
            if fits and group % expert == 0 and wanted.ep.allows(expert):
                best = used
    return best


@given(rules(), st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any), st.none() | st.integers(1, 8))
def test_no_feasible_mesh_uses_more_gpus(wanted: MeshConstraints, nodes: list[int], max_dp: int | None) -> None:
    best = brute_force(wanted, nodes, max_dp)
    if not best:
        with pytest.raises(ConfigError, match=r"the smallest change that helps|no single change helps"):
            plan_mesh(gpus_per_node=nodes, constraints=wanted, max_dp=max_dp)
        return
    plan = plan_mesh(gpus_per_node=nodes, constraints=wanted, max_dp=max_dp)
    assert plan.used == best == sum(plan.used_per_node)
    assert all(wanted.axis(name).allows(degree) for name, degree in plan.axes.items())
    assert [u + s for u, s in zip(plan.used_per_node, plan.spares_per_node, strict=True)] == nodes
    assert (plan.axes["dp_shard"] * plan.axes["cp"]) % plan.axes["ep"] == 0


@given(rules(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_groups_that_stay_inside_a_node_do(wanted: MeshConstraints, nodes: list[int]) -> None:
    try:
        plan = plan_mesh(gpus_per_node=nodes, constraints=wanted)
    except ConfigError:
        return
    node_of = [node for node, used in enumerate(plan.used_per_node) for _ in range(used)]
    for index, name in enumerate(WORLD):
        if wanted.inside_node(name):
            groups: dict[tuple[int, ...], set[int]] = {}
            for rank, node in enumerate(node_of):
                groups.setdefault(tuple(plan.coordinates(rank)[axis] for axis in WORLD[:index]), set()).add(node)
            # all ranks that differ only in this axis or further in
            assert all(len(found) == 1 for found in groups.values())
    if wanted.inside_node("ep"):
        experts: dict[tuple[int, ...], set[int]] = {}
        for rank, node in enumerate(node_of):
            at = plan.coordinates(rank)
            group = (at["dp_shard"] * plan.axes["cp"] + at["cp"]) // plan.axes["ep"]
            experts.setdefault((at["pp"], at["dp_replicate"], group), set()).add(node)
        assert all(len(found) == 1 for found in experts.values())


def test_expert_groups_stay_inside_a_node_when_told() -> None:
    rules = MeshConstraints.of(tp=2, cp=2, ep="4,in")
    plan = plan_mesh(gpus_per_node=[8, 12, 8], constraints=rules)
    assert plan.axes == mesh(tp=2, cp=2, dp_shard=6, ep=4)
    assert plan.used_per_node == (8, 8, 8)
    with pytest.raises(ConfigError, match='ep 2 instead of 8, or ep across nodes \\("8,out"\\)'):
        plan_mesh(gpus_per_node=[8] * 4, constraints=MeshConstraints.of(tp=4, ep="8,in"))
    assert plan_mesh(gpus_per_node=[8] * 4, constraints=MeshConstraints.of(tp=4, ep=8)).used == 32
    assert plan_mesh(gpus_per_node=[8] * 4, constraints=MeshConstraints.of(ep="in")).axes == mesh(dp_shard=32, ep=8)


@given(rules(), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.none() | st.integers(1, 8), st.booleans())
def test_among_thousands_of_shapes_the_same_mesh_is_found(
    wanted: MeshConstraints, nodes: list[int], max_dp: int | None, before: bool
) -> None:
    """Looking only at the promising ones changes nothing."""

    def found() -> object:
        previous = mesh(tp=2, dp_shard=2) if before else None
        fitter = MeshFitter(wanted, largest_node=max(nodes), gpus=sum(nodes), max_dp=max_dp, previous=previous)
        return [fitter.fit(Counter(nodes[:count])) for count in range(len(nodes), 0, -1)]

    one_by_one = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promising, "_FEW", 0)
        assert found() == one_by_one


def test_constraints_that_leave_millions_of_meshes_open_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave too much open"):
        plan_mesh(131_072, MeshConstraints.of(pp="<=1000", cp="<=1000", tp="<=1000,out"), gpus_per_node=8)


@given(rules(), st.integers(1, 60))
def test_coordinates_name_each_rank_once(wanted: MeshConstraints, ranks: int) -> None:
    try:
        plan = plan_mesh(ranks, wanted)
    except ConfigError:
        return
    places = {tuple(plan.coordinates(rank).values()) for rank in range(plan.used)}
    assert len(places) == plan.used


@pytest.mark.parametrize(
    ("nodes", "wanted", "help_"),
    [
        ([8], MeshConstraints.of(pp=2, tp=8), "pp 1 instead of 2, or tp 4 instead of 8, or 1 more node of 8 GPUs"),
        ([2], MeshConstraints.of(tp=4), "tp 2 instead of 4, or nodes of at least 4 GPUs"),
        ([2, 2], MeshConstraints.of(tp=4), 'tp 2 instead of 4, or tp across nodes ("4,out"), or nodes of at least 4 GPUs'),
        ([4, 4], MeshConstraints.of(dp_shard=">=12"), "dp_shard at least 8 instead of 12, or 1 more node of 4 GPUs"),
        ([4], MeshConstraints.of(pp=9), "pp 4 instead of 9, or 2 more nodes of 4 GPUs"),
    ],
)
def test_a_refusal_names_the_smallest_change(nodes: list[int], wanted: MeshConstraints, help_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_mesh(gpus_per_node=nodes, constraints=wanted)
    assert help_ in str(caught.value), str(caught.value)


def test_a_refusal_because_of_the_batch_says_so() -> None:
    with pytest.raises(ConfigError, match="a global batch of at least 8"):
        plan_mesh(8, MeshConstraints.of(dp_shard=8), max_dp=4)


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("4", Axis(fixed=4)),
        (4, Axis(fixed=4)),
        ("any", Axis()),
        ("<=8", Axis(at_most=8)),
        (">=2,<=8", Axis(at_least=2, at_most=8)),
        ("/32, in", Axis(divides=32, inside_node=True)),
        ("16,out", Axis(fixed=16, inside_node=False)),
        ({"at_most": 3}, Axis(at_most=3)),
    ],
)
def test_constraints_can_be_written_down(text: object, axis: Axis) -> None:
    assert Axis.of(text) == axis


@pytest.mark.parametrize(
    "bad",
    [
        "four",
        "<8",
        "",
        "-1",
        ">=0",
        ">=9999999",
        "0",
        0,
        True,
        1.5,
        "<=2,>=3",
        "3,/4",
        "4,2",
        "4,4",
        "<=8,<=4",
        "in,out",
        "in,in",
        "9" * 5000,
        "<=" + "9" * 5000,
        "٤",
        {"fixd": 1},
    ],
)
def test_nonsense_constraints_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError):
        Axis.of(bad)


@pytest.mark.parametrize("name", ["pp", "cp", "ep"])
def test_an_axis_of_the_models_own_layout_needs_a_limit(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no upper limit"):
        MeshConstraints.of(**{name: ">=2"})


def test_the_smallest_worlds() -> None:
    assert plan_mesh(1).axes == mesh()
    assert plan_mesh(1).reason == "one rank on 1 of 1 GPUs"
    assert plan_mesh(3).axes == plan_mesh(3, gpus_per_node=1).axes == mesh(dp_shard=3)
    for ranks, size in ((0, None), (None, None), (4, 0), (4, -1)):
        with pytest.raises(ConfigError, match="cannot be planned for"):
            plan_mesh(ranks, gpus_per_node=size)


def test_the_reason_names_the_axes_that_are_not_one_and_why_gpus_are_spare() -> None:
    plan = plan_mesh(gpus_per_node=[8, 7], constraints=MeshConstraints.of(tp=4), max_dp=100)
    assert plan.reason == "dp_shard 3 x tp 4 on 12 of 15 GPUs; 3 spare: 3 because groups of 4 stay inside a node"


def test_of_equals_the_one_with_the_smaller_model_groups_wins() -> None:
    assert plan_mesh(8, MeshConstraints.of(dp_shard=2, tp="/4")).axes == mesh(dp_shard=2, dp_replicate=4)
    assert plan_mesh(8, MeshConstraints.of(dp_shard=2, pp="/4")).axes == mesh(dp_shard=2, dp_replicate=4)


def test_unknown_and_unbounded_axes_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tp'"):
        MeshConstraints.of(tpp=4)
    with pytest.raises(ConfigError, match="pp has no upper limit"):
        MeshConstraints.of(pp="any")


@pytest.mark.parametrize("nodes", [[], [0, 0], [-1, 2]])
def test_no_gpus_at_all(nodes: list[int]) -> None:
    with pytest.raises(ConfigError, match="without GPUs"):
        plan_mesh(gpus_per_node=nodes)
