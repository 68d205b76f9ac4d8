"""The samples of a step depend on nothing but seed, epoch and what was consumed."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.elastic import Position, SampleOrder, plan_batch
from slurm_resilience.elastic.permutation import Permutation
from slurm_resilience.errors import ConfigError

orders = st.builds(
    SampleOrder, num_samples=st.integers(1, 400), seed=st.integers(0, 2**63), shuffle=st.booleans(), drop_last=st.booleans()
)


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 50))
def test_a_permutation_has_every_item_once(size: int, seed: int, epoch: int) -> None:
    shuffle = Permutation(size, (seed, epoch))
    assert sorted(shuffle[place] for place in range(size)) == list(range(size))


@given(st.integers(1, 5000), st.integers(0, 2**64))
def test_many_at_once_are_the_same_as_one_by_one(size: int, seed: int) -> None:
    shuffle = Permutation(size, (seed,))
    assert shuffle.many(range(size)) == [shuffle[place] for place in range(size)]


def test_the_order_is_part_of_the_checkpoint_format() -> None:
    """These numbers may only change together with ``permutation.VERSION``."""
    assert list(SampleOrder(10, seed=7).samples(0, range(10))) == [0, 6, 5, 1, 4, 9, 2, 8, 3, 7]
    assert SampleOrder(10**12, seed=7).sample(3, 10**11) == 429962625906


def test_the_fingerprint_is_part_of_the_checkpoint_format() -> None:
    """A release that wrote it in another way would refuse every checkpoint of the one before."""
    assert SampleOrder(12, seed=7, dataset="text").fingerprint == "b37e3fc74c755c2668b8562a"
    assert SampleOrder(12, seed=7).fingerprint != SampleOrder(12, seed=8).fingerprint


def test_the_place_after_the_last_is_outside() -> None:
    with pytest.raises(IndexError):
        Permutation(290, (1,)).many(range(1, 291))
    assert len(Permutation(290, (1,)).many(range(290))) == 290


@pytest.mark.parametrize("bad", [-1, 12, 10**9])
@pytest.mark.parametrize("shuffle", [True, False])
def test_places_outside_are_refused(bad: int, shuffle: bool) -> None:
    with pytest.raises(IndexError):
        SampleOrder(12, shuffle=shuffle).sample(0, bad)
    with pytest.raises(IndexError):
        Permutation(290, (1,)).many(range(bad, bad + 280))


def test_shuffles_are_fair_over_epochs() -> None:
    """Each sample visits each place equally often, and neighbours are not kept together: chi-square within 5 sigma."""
    size, epochs = 20, 4000
    seen = [[0] * size for _ in range(size)]
    followed = [[0] * size for _ in range(size)]
    for epoch in range(epochs):
        ids = SampleOrder(size, seed=1).samples(epoch, range(size))
        for place, sample in enumerate(ids):
            seen[place][sample] += 1
        for one, other in itertools.pairwise(ids):
            followed[one][other] += 1
    expected = epochs / size
    chi = sum((count - expected) ** 2 / expected for row in seen for count in row)
    freedom = (size - 1) ** 2
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5
    pair = epochs * (size - 1) / (size * (size - 1))
    chi = sum((followed[a][b] - pair) ** 2 / pair for a in range(size) for b in range(size) if a != b)
    freedom = size * (size - 1) - 1
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_large_shuffle_moves_samples_far() -> None:
    ids = SampleOrder(100_000, seed=5).samples(0, range(100_000))
    moved = statistics.fmean(abs(place - sample) for place, sample in enumerate(ids))
    assert 33_000 < moved < 33_700  # a random permutation moves an item a third of the length on average


@given(orders, st.integers(1, 60), st.lists(st.integers(1, 16), min_size=1, max_size=30))
def test_each_sample_once_per_epoch_through_any_worlds(order: SampleOrder, batch: int, worlds: list[int]) -> None:
    """The world changes (and the state is saved and loaded) before every step; the ids of the ranks together make the epoch."""
    if order.drop_last and order.num_samples < batch:
        with pytest.raises(ConfigError, match="no batch"):
            order.steps_per_epoch(batch)
        return
    steps = order.steps_per_epoch(batch)
    state = json.dumps(order.state(Position()))
    for epoch in range(2):
        seen: list[int] = []
        for step in range(steps):
            position = order.resume(json.loads(state))
            current = order.batch(position, batch)
            assert current.epoch == epoch
            assert current.ids == order.batch_at(epoch * steps + step, batch).ids
            world = worlds[(epoch * steps + step) % len(worlds)]
            plan = plan_batch(max(batch, world), 3, world).resized(len(current.ids))
            for rank in range(world):
                seen += [current.ids[p] for m in plan.micro_batches(rank) if not m.filler for p in m.positions]
            state = json.dumps(order.state(current.after))
        assert len(seen) == len(set(seen)) == (steps * batch if order.drop_last else order.num_samples)
    assert order.resume(json.loads(state)) == Position(2, 0)


@given(orders, st.integers(1, 50), st.integers(0, 200))
def test_any_step_is_reached_in_one_jump(order: SampleOrder, batch: int, step: int) -> None:
    if order.drop_last and order.num_samples < batch:
        return
    position = Position()
    for _ in range(step):
        position = order.batch(position, batch).after
    assert order.batch(position, batch).ids == order.batch_at(step, batch).ids
    assert order.settle(order.position_at(step, batch), batch) == position


def test_twelve_samples_from_four_ranks_to_two_in_mid_epoch() -> None:
    order = SampleOrder(12, shuffle=False)
    seen: list[int] = []
    position = Position()
    for world in (4, 2, 1, 2):
        current = order.batch(position, 3)
        plan = plan_batch(4, 1, world).resized(len(current.ids))
        seen += [current.ids[p] for r in range(world) for m in plan.micro_batches(r) if not m.filler for p in m.positions]
        position = order.resume(order.state(current.after))
    assert sorted(seen) == list(range(12))


def test_resume_at_the_last_batch_and_at_the_very_end_of_an_epoch() -> None:
    order = SampleOrder(10, seed=3)
    last = order.batch(Position(0, 8), 4)
    assert len(last.ids) == 2
    assert last.after == Position(1, 0)
    end = order.batch(Position(0, 10), 4)
    assert end.epoch == 1
    assert end.ids == order.batch(Position(1, 0), 4).ids != order.batch(Position(0, 0), 4).ids


def test_drop_last_passes_over_the_tail() -> None:
    order = SampleOrder(10, drop_last=True)
    assert order.batch(Position(0, 8), 4).before == Position(0, 8)
    assert order.batch(Position(0, 8), 4).epoch == 1
    assert order.steps_per_epoch(4) == 2


@pytest.mark.parametrize(
    "other",
    [
        SampleOrder(12, seed=1),
        SampleOrder(13),
        SampleOrder(12, shuffle=False),
        SampleOrder(12, drop_last=True),
        SampleOrder(12, dataset="b"),
    ],
)
def test_another_data_set_or_order_is_refused(other: SampleOrder) -> None:
    with pytest.raises(ConfigError, match="another"):
        other.resume(SampleOrder(12).state(Position(0, 4)))


def test_an_impossible_place_is_refused() -> None:
    order = SampleOrder(12)
    for state in ({"epoch": -1}, {"consumed": 13}, {"consumed": -1}):
        with pytest.raises(ConfigError, match="impossible"):
            order.resume({**order.state(Position()), **state})


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 samples"):
        SampleOrder(0)


def test_one_rank_becomes_two_in_mid_epoch_and_nothing_is_passed_over() -> None:
    """Samples 4 to 7 must not vanish when the second rank appears."""
    order, seen, position = SampleOrder(16, shuffle=False), [], Position()
    for world in (1, 2, 2, 1):
        current = order.batch(position, 4)
        plan = plan_batch(4, 2, world)
        seen.append(sorted(current.ids[p] for r in range(world) for m in plan.micro_batches(r) for p in m.positions))
        position = order.resume(order.state(current.after))
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("micro", [1, 2, 3, 8, 32])
def test_steps_of_an_epoch_do_not_depend_on_micro_batch_or_world(micro: int) -> None:
    order = SampleOrder(256)
    for world in (1, 3, 4):
        position, steps = Position(), 0
        while position.epoch == 0:
            current = order.batch(position, 32)
            assert sum(plan_batch(32, micro, world).samples_per_rank) == len(current.ids)
            position, steps = current.after, steps + 1
        assert steps == order.steps_per_epoch(32) == 8
