from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience import Run
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.data import Batches, make_batches, scale_loss


def batches(samples: int = 23, whole: int = 10, micro: int = 3, rank: int = 0, ranks: int = 1, **options: Any) -> Batches:
    given = {"seed": 1, "shuffle": True, "drop_last": False, "dataset": "", "deal": "even", "reduce": "mean"} | options
    return make_batches(samples, whole, micro, rank=rank, ranks=ranks, **given)


@given(st.lists(st.integers(0, 9), max_size=12))
def test_looking_ahead_changes_nothing(looks: list[int]) -> None:
    plain, prefetched = batches(), batches()
    for look in looks:
        prefetched.global_ids(look)
    assert [prefetched.global_ids(step) for step in range(8)] == [plain.global_ids(step) for step in range(8)]


def test_a_completed_steps_samples_are_not_given_again() -> None:
    one = batches()
    one.advance(3)
    assert one.global_ids(3) == batches().global_ids(3)
    for step in (0, 2):
        with pytest.raises(ConfigError, match=f"Batches of step {step} were asked for, but the run stands at step 3"):
            one.global_ids(step)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=6))
def test_through_any_worlds_each_epoch_has_each_sample_once(parts: list[tuple[int, int]]) -> None:
    step, state = 0, None
    taken: dict[int, list[int]] = {}
    for steps, ranks in parts:
        world = [batches(rank=rank, ranks=ranks) for rank in range(ranks)]
        for one in world:
            one.seek(step, state)
        for _ in range(steps):
            for one in world:
                mine = [sample for micro in one(step) if not micro.filler for sample in micro.indices]
                taken.setdefault(one.epoch(step), []).extend(mine)
            step += 1
            for one in world:
                one.advance(step)
        states = [json.loads(json.dumps(one.state(step))) for one in world]
        assert all(one == states[0] for one in states)
        state = states[0]
    *whole, _ = [sorted(samples) for _, samples in sorted(taken.items())]
    assert all(samples == list(range(23)) for samples in whole)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_scaled_losses_add_up_to_the_mean_over_the_global_batch(ranks: int, reduce: str) -> None:
    def loss(sample: int) -> float:
        return (sample * 7919 % 101) / 101

    for step in range(3):
        sums, means, ids = 0.0, 0.0, ()
        for rank in range(ranks):
            one = batches(rank=rank, ranks=ranks, reduce=reduce)
            ids = one.global_ids(step)
            for micro in one(step):
                values = [loss(sample) for sample in micro.indices]
                means += scale_loss(sum(values) / len(values), micro)
                sums += scale_loss(sum(values), micro, reduction="sum")
        share = ranks if reduce == "mean" else 1
        expected = sum(map(loss, ids)) / len(ids)
        assert means / share == pytest.approx(expected)
        assert sums / share == pytest.approx(expected)


def test_every_rank_makes_the_same_number_of_passes_and_only_the_last_is_last() -> None:
    for ranks in (1, 2, 3, 5):
        passes = [list(batches(rank=rank, ranks=ranks)(2)) for rank in range(ranks)]
        assert len({len(one) for one in passes}) == 1
        assert all([micro.last for micro in one] == [False] * (len(one) - 1) + [True] for one in passes)
        assert all([micro.first for micro in one] == [True] + [False] * (len(one) - 1) for one in passes)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="Nobody says how many samples"):
        make_batches(
            9, None, None, rank=0, ranks=1, seed=0, shuffle=True, drop_last=False, dataset="", deal="even", reduce="mean"
        )
    with pytest.raises(ConfigError, match="cannot be divided over 11"):
        batches(ranks=11)
    with pytest.raises(ConfigError, match="has no batch of 30"):
        batches(whole=30, drop_last=True)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not_is_refused_before_anything_is_read(rank: int, ranks: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"Rank {rank} of {ranks} has no share"):
        batches(rank=rank, ranks=ranks)
    shards = SimpleNamespace(num_shards=4, read_shard=lambda shard, skip: iter(range(skip, 9)))
    with Run(folder=tmp_path) as run, pytest.raises(ConfigError, match="has no share of the batch"):
        run.loader(shards, 6, 2, dp_rank=rank, dp_ranks=ranks)


def test_another_micro_batch_changes_neither_the_steps_of_an_epoch_nor_their_samples() -> None:
    def epoch(micro: int, ranks: int) -> list[list[int]]:
        steps: list[list[int]] = []
        while True:
            world = [batches(micro=micro, rank=rank, ranks=ranks) for rank in range(ranks)]
            if world[0].epoch(len(steps)):
                return steps
            taken = [index for one in world for part in one(len(steps)) if not part.filler for index in part.indices]
            steps.append(sorted(taken))

    first = epoch(10, 1)
    assert len(first) == 3
    assert all(epoch(micro, ranks) == first for micro, ranks in ((1, 1), (2, 4), (3, 2), (5, 3)))
