"""Which nodes are used, and that a node nobody knows of comes after those that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.elastic import Node, allocate
from slurm_resilience.elastic.allocation import NodeState
from slurm_resilience.errors import ConfigError

UP, DOWN, DRAINED, UNKNOWN = NodeState.UP, NodeState.DOWN, NodeState.DRAINED, NodeState.UNKNOWN


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def test_down_drained_excluded_and_empty_nodes_are_left_out_with_the_reason() -> None:
    found = allocate(
        [
            Node("a", 8),
            Node("b", 8, DOWN),
            Node("c", 8, DRAINED),
            Node("d", 8, excluded="three crashes"),
            Node("e", 0),
            Node("f", None),
            Node("g", 4),
        ]
    )
    assert names(found.nodes) == ["a", "g"]
    assert found.slots == (8, 4)
    assert found.left_out == {
        "b": "down",
        "c": "drained",
        "d": "excluded: three crashes",
        "e": "no usable slot",
        "f": "nobody could tell how many ranks it can hold",
    }


def test_suspects_help_only_up_to_the_minimum() -> None:
    nodes = [Node("a", 8), Node("b", 8, suspect="hung once"), Node("c", 8, suspect="slow"), Node("d", 8)]
    assert names(allocate(nodes).nodes) == ["a", "d"]
    assert names(allocate(nodes).spare_nodes) == ["b", "c"]
    assert names(allocate(nodes, minimum=3).nodes) == ["a", "b", "d"]
    assert names(allocate(nodes, minimum=4).nodes) == ["a", "b", "c", "d"]


def test_spares_and_unknown_nodes_fill_up_in_that_order_and_big_nodes_go_first() -> None:
    nodes = [Node("spare", 8, spare=True), Node("dark", 8, UNKNOWN), Node("small", 7), Node("big", 8)]
    assert names(allocate(nodes, maximum=1).nodes) == ["big"]
    assert names(allocate(nodes, maximum=2).nodes) == ["small", "big"]
    assert names(allocate(nodes, maximum=3).nodes) == ["dark", "small", "big"]
    assert names(allocate(nodes, maximum=4).nodes) == ["spare", "dark", "small", "big"]


def test_too_few_nodes_say_which_are_missing_and_what_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        allocate([Node("a", 8), Node("b", 8, DOWN)], minimum=2)
    assert "1 usable node cannot hold the minimum of 2" in str(caught.value)
    assert "b: down" in str(caught.value)
    assert "lower the minimum to 1, or give 1 more usable node" in str(caught.value)
    with pytest.raises(ConfigError, match="give 2 more usable nodes") as caught:
        allocate([], minimum=2)
    assert "lower" not in str(caught.value)


@pytest.mark.parametrize(("low", "high"), [(0, None), (2, 1)])
def test_an_impossible_range_is_refused(low: int, high: int | None) -> None:
    with pytest.raises(ConfigError, match="makes no sense"):
        allocate([Node("a", 1), Node("b", 1)], minimum=low, maximum=high)


def test_a_node_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice: a"):
        allocate([Node("a", 1), Node("a", 1)])


nodes = st.builds(
    Node,
    name=st.sampled_from("abcdef"),
    slots=st.none() | st.integers(0, 8),
    state=st.sampled_from(list(NodeState)),
    suspect=st.sampled_from(["", "slow"]),
    excluded=st.sampled_from(["", "broken"]),
    spare=st.booleans(),
)


@given(st.lists(nodes, max_size=6, unique_by=lambda node: node.name), st.integers(1, 4), st.none() | st.integers(4, 6))
def test_every_node_is_used_spare_or_left_out(cluster: list[Node], minimum: int, maximum: int | None) -> None:
    usable = [node for node in cluster if not node.unusable]
    if len(usable) < minimum:
        with pytest.raises(ConfigError):
            allocate(cluster, minimum=minimum, maximum=maximum)
        return
    found = allocate(cluster, minimum=minimum, maximum=maximum)
    assert sorted([*names(found.nodes), *names(found.spare_nodes), *found.left_out]) == sorted(node.name for node in cluster)
    assert [node for node in cluster if node in found.nodes] == list(found.nodes)
    assert minimum <= len(found.nodes) <= (maximum or len(cluster))
    assert all(found.slots)
    # No used suspect while a clean node waits.
    assert not (any(n.suspect for n in found.nodes) and any(not n.suspect for n in found.spare_nodes))
