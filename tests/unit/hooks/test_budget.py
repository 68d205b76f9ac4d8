"""However the nodes' reads and writes fall between each other, no more of them stay drained than the budget allows."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.hooks import budget, reason
from slurm_resilience.hooks.nodes import Node

LIMITS: dict[str, float] = {**budget.DEFAULTS, "correlated_nodes": 1000, "partition_max_percent": 100}
NOW = 1_796_000_000.0


def node(name: str, state: str = "IDLE", why: str = "", since: float = 0.0, comment: str = "", user: str = "root") -> Node:
    return Node(name, state, "low", why, user if why else "", since, comment)


def ours(name: str, check: str, at: float, since: float | None = None) -> Node:
    text = reason.compose(check, "", "", "", at, "ab12", "x")
    return node(name, "IDLE+DRAIN", text, at if since is None else since)


def cluster(size: int, *special: Node) -> list[Node]:
    named = {each.name: each for each in special}
    return [named.get(f"n{index}", node(f"n{index}")) for index in range(1, size + 1)]


@pytest.mark.parametrize(
    ("total", "most", "percent", "expected"),
    [(4, 10, 25, 1), (2, 10, 5, 1), (100, 10, 5, 5), (1000, 10, 5, 10), (1, 0, 5, 0), (9, 9, 0, 0)],
)
def test_the_smaller_limit_counts_and_one_node_may_always_go(total: int, most: float, percent: float, expected: int) -> None:
    assert budget.allowed(total, most, percent) == expected


@pytest.mark.parametrize(
    ("special", "kind"),
    [
        ([], "granted"),
        ([node("n1", "IDLE+DRAIN", "ADMIN: do not touch", NOW)], "foreign"),
        ([node("n1", "IDLE", "a left-over reason", NOW)], "foreign"),
        ([ours("n1", "gpu", NOW)], "already"),
        ([node("n1", "IDLE+REBOOT_REQUESTED")], "leave"),
        ([node("n1", "DOWN+REBOOT_ISSUED")], "leave"),
        ([node("n1", "IDLE+PLANNED")], "leave"),
        ([node("n1", "IDLE+POWERED_DOWN")], "leave"),
        ([node("n1", "ALLOCATED+CLOUD+POWERING_UP")], "leave"),
        ([node("n1", "MIXED+CLOUD")], "granted"),
        ([node("n2", "IDLE+DRAIN", "ADMIN", NOW)], "spent"),
        ([node("n2", "DOWN*")], "spent"),
        ([node("n2", "IDLE+NOT_RESPONDING")], "spent"),
        ([node("n2", "IDLE+POWERED_DOWN")], "granted"),
    ],
)
def test_what_stands_in_the_way_of_a_drain(special: list[Node], kind: str) -> None:
    decision = budget.decide(cluster(4, *special), "n1", "gpu", LIMITS, NOW)
    assert decision.kind == kind, decision.why


def test_exactly_one_known_node() -> None:
    for name in ("ALL", "n9", "n1,n2", ""):
        assert budget.decide(cluster(4), name, "gpu", LIMITS, NOW).kind == "unknown_node"


def test_the_partition_has_a_budget_of_its_own() -> None:
    nodes = cluster(100, node("n2", "DOWN"))
    for each in nodes[:2]:
        each.partitions = ["small"]
    assert budget.decide(nodes, "n1", "gpu", {**LIMITS, "partition_max_percent": 50}, NOW).kind == "spent"
    assert budget.decide(nodes, "n3", "gpu", {**LIMITS, "partition_max_percent": 50}, NOW).kind == "granted"


def test_a_node_that_came_back_still_counts_in_the_window() -> None:
    back = node("n2", comment=f"{{sr:back gpu {int(NOW - 60)}}}")
    assert budget.decide(cluster(100, back), "n1", "gpu", {**LIMITS, "window_max_nodes": 1}, NOW).kind == "spent"
    assert budget.decide(cluster(100, back), "n1", "gpu", {**LIMITS, "window_max_nodes": 1, "window_s": 30}, NOW).granted


def test_the_same_check_on_many_nodes_suspects_the_check() -> None:
    flags = [node(f"n{i}", comment=f"{{sr:flag gpu {int(NOW - 5)} x}}") for i in (2, 3)]
    limits = {**LIMITS, "correlated_nodes": 3}
    assert budget.decide(cluster(100, *flags), "n1", "gpu", limits, NOW).kind == "correlated"
    assert budget.decide(cluster(100, *flags), "n1", "memory", limits, NOW).granted
    assert budget.decide(cluster(100, *flags), "n1", "gpu", limits, NOW + 3600).granted


class Controller:
    """What Slurm is to us: last writer wins, and times are whole seconds of one clock."""

    def __init__(self, size: int) -> None:
        self.nodes = {f"n{index}": node(f"n{index}") for index in range(1, size + 1)}
        self.now = NOW

    def read(self) -> list[Node]:
        return list(self.nodes.values())

    def drain(self, name: str, at: float) -> None:
        self.nodes[name] = ours(name, "gpu", at, since=float(int(self.now)))

    def undrain(self, name: str) -> None:
        self.nodes[name] = node(name)


def life(slurm: Controller, name: str, skew_s: float, limits: dict[str, float]) -> Any:
    """One node's steps, as drain.py takes them; each yield lets others go on, and says how long it takes."""
    yield 0.0
    if not budget.decide(slurm.read(), name, "gpu", limits, slurm.now + skew_s).granted:
        return
    stamp = slurm.now + skew_s
    yield 0.0  # anything may happen between deciding and writing
    slurm.drain(name, stamp)
    yield 1.2
    if not budget.confirm(slurm.read(), name, "gpu", limits, slurm.now + skew_s).granted:
        yield 0.0
        slurm.undrain(name)


@given(
    size=st.integers(1, 12),
    most=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    skews=st.lists(st.floats(-100, 100), min_size=12),
)
def test_no_interleaving_keeps_more_nodes_out_than_the_budget(size: int, most: int, seed: int, skews: list[float]) -> None:
    dice = random.Random(seed)
    limits = {**LIMITS, "max_nodes": most, "max_percent": 100}
    slurm = Controller(size)
    ready = {name: (life(slurm, name, skews[index], limits), slurm.now) for index, name in enumerate(slurm.nodes)}
    while ready:
        name = dice.choice(list(ready))
        steps, due = ready.pop(name)
        slurm.now = max(slurm.now + dice.choice([0.0, 0.01, 0.4]), due)
        pause = next(steps, None)
        if pause is not None:
            ready[name] = (steps, slurm.now + pause + dice.choice([0.0, 0.0, 0.3, 3.0]))
    drained = [each.name for each in slurm.read() if each.drained]
    assert 1 <= len(drained) <= budget.allowed(size, most, 100), drained


def test_the_line_is_slurmctlds_not_the_nodes_own_clocks() -> None:
    first, second = ours("n1", "gpu", at=NOW + 90, since=NOW), ours("n2", "gpu", at=NOW - 90, since=NOW + 1)
    both = cluster(4, first, second)
    assert budget.confirm(both, "n1", "gpu", LIMITS, NOW).granted
    assert budget.confirm(both, "n2", "gpu", LIMITS, NOW).kind == "spent"
    changed = cluster(4, node("n1", "IDLE+DRAIN", "ADMIN", NOW))
    assert budget.confirm(changed, "n1", "gpu", LIMITS, NOW).kind == "foreign"


def test_the_order_is_total() -> None:
    same = [ours(name, "gpu", NOW) for name in ("n1", "n2", "n3")]
    assert len({budget.order(each) for each in same}) == 3
    assert all(budget.order(a) != budget.order(b) for a, b in itertools.combinations(same, 2))
