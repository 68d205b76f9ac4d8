"""Shards that can only be read from their beginning: each sample once per epoch through any worlds, none lost in a queue."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience import Run
from slurm_resilience.elastic.batch import plan_batch
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.stream import Stream

SIZES = (5, 0, 9, 1, 4, 12, 3)


class Shards:
    """Shards of given sizes; a sample is (shard, place)."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes = sizes
        self.num_shards = len(sizes)

    def read_shard(self, shard: int, skip: int) -> Iterator[tuple[int, int]]:
        for place in range(skip, self.sizes[shard]):
            yield shard, place


class World:
    """Ranks as threads that meet as real ones do."""

    def __init__(self, ranks: int, dataset: Any, *, whole: int, micro: int = 2, **options: Any) -> None:
        self.ranks = ranks
        self._said: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=60)
        self.streams = [
            Stream(
                dataset, plan_batch(whole, micro, ranks), rank=rank, seed=3, collate_fn=list,
                exchange=lambda mine, rank=rank: self._exchange(rank, mine), **options,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def _exchange(self, rank: int, mine: Any) -> list[Any]:
        self._said[rank] = mine
        self._barrier.wait()
        everyone = list(self._said)
        self._barrier.wait()
        return everyone

    def step(self, step: int) -> list[list[tuple[Any, Any]]]:
        """The micro-batches of each rank."""
        taken: list[Any] = [None] * self.ranks

        def take(rank: int) -> None:
            try:
                taken[rank] = list(self.streams[rank](step))
            except BaseException:
                self._barrier.abort()
                raise

        threads = [threading.Thread(target=take, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in taken
        return taken


def walk(parts: list[tuple[int, int]], dataset: Any, *, whole: int, **options: Any) -> dict[int, list[Any]]:
    step, state = 0, None
    trained: dict[int, list[Any]] = {}
    for steps, ranks in parts:
        world = World(ranks, dataset, whole=whole, **options)
        for one in world.streams:
            one.seek(step, state)
        for _ in range(steps):
            taken = world.step(step)
            (epoch,) = {one.epoch for one in world.streams}
            passes = {len(of_rank) for of_rank in taken}
            assert len(passes) == 1, "a rank makes fewer passes than another"
            real = [(micro, batch) for of_rank in taken for micro, batch in of_rank if not micro.filler]
            samples = [sample for _, batch in real for sample in batch]
            assert all(list(micro.places) == batch for micro, batch in real)
            assert 1 <= len(samples) <= whole
            assert sum(micro.weight for micro, _ in real) == pytest.approx(1)
            assert all(batch and micro.mean_scale == 0 for of_rank in taken for micro, batch in of_rank if micro.filler)
            trained.setdefault(epoch, []).extend(samples)
            step += 1
            for one in world.streams:
                one.advance(step)
        states = [json.loads(json.dumps(one.state(step))) for one in world.streams]
        assert all(one == states[0] for one in states)
        state = states[0]
        for one in world.streams:
            one.close()
    return trained


def every_sample(dataset: Shards) -> list[tuple[int, int]]:
    return [(shard, place) for shard, size in enumerate(dataset.sizes) for place in range(size)]


def whole_epochs(trained: dict[int, list[Any]], dataset: Shards) -> int:
    *whole, last = (sorted(samples) for _, samples in sorted(trained.items()))
    assert all(samples == every_sample(dataset) for samples in whole)
    assert len(set(last)) == len(last)
    return len(whole)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any),
    st.integers(4, 9),
)
@settings(max_examples=60)
def test_through_any_worlds_each_epoch_has_each_sample_once(parts: list[tuple[int, int]], sizes: list[int], whole: int) -> None:
    dataset = Shards(tuple(sizes))
    whole_epochs(walk(parts, dataset, whole=whole), dataset)


def test_real_workers_lose_nothing_that_they_have_read_ahead() -> None:
    dataset = Shards()
    trained = walk([(2, 2), (1, 1), (6, 3)], dataset, whole=6, num_workers=2, prefetch_factor=4)
    assert whole_epochs(trained, dataset) >= 1


def test_a_rank_that_runs_dry_gets_of_what_the_others_have_left() -> None:
    """One shard each at first; without dealing again, rank 1 would be dry after its one sample."""
    dataset = Shards((1, 8, 1, 8, 1, 8))
    world = World(2, dataset, whole=8, shuffle=False)
    counts = []
    for step in range(3):
        counts.append(sum(len(micro) for of_rank in world.step(step) for micro, _ in of_rank if not micro.filler))
        for one in world.streams:
            one.advance(step + 1)
    assert counts == [8, 8, 8]


def test_one_long_shard_stays_whole_and_its_short_steps_are_weighted_by_what_they_have() -> None:
    world = World(2, Shards((6,)), whole=4)
    (mine, other) = world.step(0)
    real, filler = (mine, other) if not mine[0][0].filler else (other, mine)
    assert [len(micro) for micro, _ in real] == [2]
    assert real[0][0].weight == 1
    assert real[0][0].mean_scale == 2  # the mean over two ranks halves it
    assert [(micro.filler, micro.sum_scale) for micro, _ in filler] == [(True, 0.0)]


def test_a_data_set_without_a_sample_is_an_error_and_not_a_loop() -> None:
    one = Stream(Shards((0, 0)), plan_batch(4, 2, 1), rank=0, seed=0, exchange=lambda mine: [mine])
    with pytest.raises(ConfigError, match="No shard of the data set has a sample"):
        next(one(0))


def test_a_checkpoint_of_another_data_set_or_batch_is_refused() -> None:
    def stream(**options: Any) -> Stream:
        whole = options.pop("whole", 6)
        given: dict[str, Any] = {"rank": 0, "seed": 0, "exchange": lambda mine: [mine], "fingerprint": "a", **options}
        return Stream(Shards(), plan_batch(whole, 2, 1), **given)

    state = stream().state(0)
    stream().seek(0, state)
    for odd in ({"fingerprint": "b"}, {"seed": 1}, {"shuffle": False}):
        with pytest.raises(ConfigError, match="another data set"):
            stream(**odd).seek(0, state)
    with pytest.raises(ConfigError, match="global batch of 6, not 8"):
        stream(whole=8).seek(0, state)
    with pytest.raises(ConfigError, match="on 7 shards, the data set has 2 now"):
        Stream(Shards((1, 2)), plan_batch(6, 2, 1), rank=0, seed=0, exchange=list, fingerprint="a").seek(0, state)
    with pytest.raises(ConfigError, match="Nobody can tell where in the data step 4 begins"):
        stream().state_at(4)
    with pytest.raises(ConfigError, match="stands at step 0, and samples of step 3"):
        next(stream()(3))


def test_a_run_streams_a_data_set_of_shards_and_goes_on_from_its_checkpoint(tmp_path: Any) -> None:
    import torch

    def train(total: int) -> list[Any]:
        with Run(folder=tmp_path) as run:
            model = torch.nn.Linear(2, 1)
            run.register(model=model)
            stream = run.loader(Shards(), 6, 2, collate_fn=list)
            run.resume()
            return [sample for step in run.steps(total) for _, batch in stream(step) for sample in batch]

    first, second = train(3), train(6)
    assert len(first) == 18
    assert sorted((first + second)[: sum(SIZES)]) == every_sample(Shards())
    with Run(folder=tmp_path) as run, pytest.raises(ConfigError, match="means nothing for a stream"):
        run.loader(Shards(), 6, 2, drop_last=True)
