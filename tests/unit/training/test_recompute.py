"""Ranks that check each other's work: who is named, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_resilience import Run
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.recompute import Account, judge

from . import programs
from .worlds import start


def accounts(count: int, wrong: dict[int, str], again: dict[int, str] | None = None, shift: int = 1) -> list[Account]:
    """What ranks report of which some compute wrong: each its own result of micro-batch ``m`` is ``m`` or a wrong one."""

    def result(rank: int, micro: int) -> str:
        return f"{micro}{wrong.get(rank, '')}"

    return [
        Account(
            f"n{rank}", result(rank, rank), (again or {}).get(rank, result(rank, rank)), result(rank, (rank + shift) % count)
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "shift", "wrong", "named"),
    [
        (4, 1, {}, None),
        (4, 1, {2: "!"}, (2,)),
        (5, 2, {0: "!"}, (0,)),
        (3, 1, {1: "!"}, (1,)),
        (2, 1, {1: "!"}, (0, 1)),
        (6, 1, {1: "!", 4: "?"}, (1, 4)),
    ],
)
def test_who_differs_from_both_its_peers_is_named(
    count: int, shift: int, wrong: dict[int, str], named: tuple[int, ...] | None
) -> None:
    found = judge(accounts(count, wrong, shift=shift), shift)
    assert (found.ranks if found else None) == named
    if found:
        assert found.nodes == tuple(f"n{rank}" for rank in found.ranks)


def test_of_two_the_one_that_contradicts_itself_is_named() -> None:
    found = judge(accounts(2, {1: "!"}, again={1: "1"}), 1)
    assert found is not None
    assert found.ranks == (1,)
    assert "twice" in found.why


def test_a_rank_that_computes_wrong_is_named_with_its_node_and_nothing_else_changes(tmp_path: Path) -> None:
    every_2: dict[str, Any] = {"verify": {"recompute_every_steps": 2}, "checkpoint": {"every_min": None}}
    losses = []
    for name, settings, wrong in (("without", {}, -1), ("with", every_2, -1), ("wrong", every_2, 1)):
        world = start(3, programs.train_checked, 5, wrong, run_dir=tmp_path / name, settings=settings)
        losses.append([one["loss"] for one in world.results()])
        suspected = [fact["fields"] for fact in world.of("node_suspected")]
        if name == "wrong":
            assert [(one["nodes"], one["ranks"]) for one in suspected] == [(["node-1"], [1])] * 3
            assert [one["step"] for one in suspected] == [0, 2, 4]
        else:
            assert suspected == []
    assert losses[0] == losses[1]


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    with Run(folder=tmp_path, verify={"recompute_every_steps": 3}) as run:
        run.register(model=programs.make_model())
        with pytest.raises(ConfigError, match=r"run\.recompute_with\(\) was not called"):
            run.resume()
    with Run(folder=tmp_path) as run, pytest.raises(ConfigError, match="needs the batches of"):
        run.recompute_with(lambda micro: 0.0, object())  # type: ignore[arg-type]
