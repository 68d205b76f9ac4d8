"""Shards of a stream: each sample once per epoch, however often and wherever the readers change."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.elastic.shards import ShardLedger, ShardTask
from slurm_resilience.errors import ConfigError


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 5), min_size=7, max_size=7)), min_size=1, max_size=40),
    st.booleans(),
)
def test_each_sample_once_per_epoch_through_any_readers(lengths, changes, shuffle) -> None:
    """Each change: so many readers, each reads so many samples of its shards, then all is saved, loaded, dealt again."""
    ledger = ShardLedger(len(lengths), seed=3, shuffle=shuffle)
    seen: list[tuple[int, int]] = []
    for readers, appetites in changes:
        progress = []
        for tasks, appetite in zip(ledger.deal(readers), appetites, strict=False):
            for task in tasks:
                took = min(appetite, lengths[task.shard] - task.skip)
                seen += [(task.shard, at) for at in range(task.skip, task.skip + took)]
                appetite -= took
                progress.append((task.shard, task.skip + took, task.skip + took == lengths[task.shard]))
        after = ledger.advance(progress)
        after = ShardLedger.resume(json.loads(json.dumps(after.state())), num_shards=len(lengths))
        assert len(seen) == len(set(seen))
        if after.epoch > ledger.epoch:
            assert sorted(seen) == [(shard, at) for shard, length in enumerate(lengths) for at in range(length)]
            seen.clear()
        ledger = after
    left = {(task.shard, at) for task in ledger.remaining() for at in range(task.skip, lengths[task.shard])}
    assert left.isdisjoint(seen)
    assert len(left) + len(seen) == sum(lengths)


def test_open_shards_are_dealt_first_and_readers_get_their_turn() -> None:
    ledger = ShardLedger(5, shuffle=False, finished=frozenset({0}), consumed={3: 7})
    assert ledger.deal(2) == ((ShardTask(3, 7), ShardTask(2)), (ShardTask(1), ShardTask(4)))
    assert [len(tasks) for tasks in ledger.deal(6)] == [1, 1, 1, 1, 0, 0]


def test_each_epoch_has_its_own_order() -> None:
    orders = {tuple(task.shard for task in ShardLedger(20, seed=1, epoch=epoch).remaining()) for epoch in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("again", [(0, 9, False), (3, 6, False)])
def test_reading_twice_is_refused(again: tuple[int, int, bool]) -> None:
    ledger = ShardLedger(5, finished=frozenset({0}), consumed={3: 7})
    with pytest.raises(ConfigError, match="was read twice"):
        ledger.advance([again])


def test_another_number_of_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 shards, the data set has 6"):
        ShardLedger.resume(ShardLedger(5).state(), num_shards=6)
    with pytest.raises(ConfigError, match="do not fit"):
        ShardLedger(5, consumed={5: 1})
    with pytest.raises(ConfigError, match="0 readers"):
        ShardLedger(5).deal(0)
