"""Real DataLoaders with real workers: each sample once per epoch, whatever is prefetched, wherever the run comes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.data import make_batches
from slurm_resilience.training.loader import Loader

from . import programs
from .worlds import RankError, run_world

SAMPLES = 23
WORKERS = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}


class Numbers(torch.utils.data.Dataset[Any]):
    """Each sample is its own number, and a random one beside it."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "drawn": (random.random(), float(np.random.rand()), float(torch.rand(())))}


class Together(Numbers):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def loader(
    rank: int = 0, ranks: int = 1, *, size: int = SAMPLES, whole: int = 10, dataset: Any = None, **options: Any
) -> Loader:
    order = {name: options.pop(name) for name in ("drop_last", "shuffle") if name in options}
    batches = make_batches(
        size, whole, 3, rank=rank, ranks=ranks, seed=1, dataset="", deal="even", reduce="mean",
        **{"shuffle": True, "drop_last": False, **order},
    )  # fmt: skip
    return Loader(batches, dataset or Numbers(size), seed=1, **options)


def walk(parts: list[tuple[int, int]], **options: Any) -> dict[int, list[int]]:
    """Epoch → samples that were trained on, through worlds of (steps, ranks); each begins with new loaders."""
    step, state = 0, None
    trained: dict[int, list[int]] = {}
    for steps, ranks in parts:
        world = [loader(rank, ranks, **options) for rank in range(ranks)]
        for one in world:
            one.batches.seek(step, state)
        for _ in range(steps):
            for one in world:
                for micro, batch in one(step):
                    assert batch["index"].tolist() == list(micro.indices)
                    if not micro.filler:
                        trained.setdefault(one.batches.epoch(step), []).extend(batch["index"].tolist())
            step += 1
            for one in world:
                one.batches.advance(step)
        state = world[0].batches.state(step)
        for one in world:
            one.close()  # with whatever was prefetched
    return trained


def whole_epochs(trained: dict[int, list[int]], size: int = SAMPLES) -> int:
    """How many epochs saw each sample exactly once; all but the last must have."""
    *whole, _ = (sorted(samples) for _, samples in sorted(trained.items()))
    assert all(samples == list(range(size)) for samples in whole)
    return len(whole)


def test_a_change_from_four_ranks_to_two_in_mid_epoch_repeats_and_loses_nothing() -> None:
    """12 samples: a known sampler repeats 6 to 11."""
    assert whole_epochs(walk([(1, 4), (3, 2)], size=12, whole=6, **WORKERS), 12) == 1


def test_a_change_from_one_rank_to_two_in_mid_epoch_skips_nothing() -> None:
    assert whole_epochs(walk([(1, 1), (4, 2)], size=8, whole=4, shuffle=False, **WORKERS), 8) == 2


def test_any_number_of_resumes_in_one_epoch_stay_aligned() -> None:
    assert whole_epochs(walk([(1, 2), (1, 3), (1, 1), (1, 4), (3, 2)])) == 2


def test_another_number_of_workers_on_resume_changes_nothing() -> None:
    undisturbed = [batch["index"].tolist() for step in range(6) for _, batch in loader()(step)]
    seen: list[Any] = []
    for first, workers in ((0, 0), (2, 2), (4, 1)):
        one = loader(num_workers=workers)
        one.batches.seek(first, one.batches.state_at(first))
        seen += [batch["index"].tolist() for step in (first, first + 1) for _, batch in one(step)]
        one.close()
    assert seen == undisturbed


@pytest.mark.parametrize("stop", [2, 3])
def test_a_resume_at_an_epochs_last_batch_and_at_its_very_end(stop: int) -> None:
    """Steps 0 to 2 are the first epoch, the next one begins with a permutation of its own, once."""
    trained = walk([(stop, 2), (6 - stop, 3), (1, 1)], **WORKERS)
    assert whole_epochs(trained) == 2
    assert trained[0] != trained[1]
    assert sorted(trained[0]) == sorted(trained[1])


def test_persistent_workers_leave_later_epochs_as_long_as_ever() -> None:
    one = loader(**WORKERS)
    one.batches.seek(1, one.batches.state_at(1))
    lengths: dict[int, int] = {}
    workers = set()
    for step in range(1, 13):
        for micro, _ in one(step):
            epoch = one.batches.epoch(step)
            lengths[epoch] = lengths.get(epoch, 0) + len(micro)
            workers.add(tuple(process.pid for process in one._loaded._workers))  # type: ignore[union-attr]
        one.batches.advance(step + 1)
    one.close()
    assert lengths == {0: SAMPLES - 10, 1: SAMPLES, 2: SAMPLES, 3: SAMPLES, 4: 10}
    assert len(workers) == 1


def test_drop_last_passes_over_other_samples_each_epoch_and_keeps_every_batch_whole() -> None:
    trained = walk([(1, 2), (3, 3), (3, 1)], drop_last=True, **WORKERS)
    assert [len(samples) for samples in trained.values()] == [20, 20, 20, 10]
    assert all(len(set(samples)) == len(samples) for samples in trained.values())
    assert set(trained[0]) != set(trained[1])


def test_a_step_that_was_left_in_the_middle_is_read_again_or_passed_over() -> None:
    one = loader(**WORKERS)
    next(one(0))
    assert [list(micro.indices) for micro, _ in one(0)] == [list(micro.indices) for micro in one.batches(0)]
    next(one(1))
    one.batches.advance(2)
    assert [batch["index"].tolist() for _, batch in one(2)] == [list(micro.indices) for micro in one.batches(2)]
    with pytest.raises(ConfigError, match="stands at step 2"):
        next(one(1))
    one.close()


@pytest.mark.parametrize("kind", [Numbers, Together])
def test_augmentations_are_the_samples_own(kind: type[Numbers]) -> None:
    """Not the worker's, not the rank's, and other ones in the next epoch."""
    first: dict[int, Any] = {}
    for workers, ranks in ((0, 1), (2, 1)):
        drawn: dict[tuple[int, int], Any] = {}
        for rank in range(ranks):
            one = loader(rank, ranks, dataset=kind(), num_workers=workers)
            for step in range(6):
                for micro, batch in one(step):
                    for place, index in enumerate(micro.indices):
                        drawn[one.batches.epoch(step), index] = [float(values[place]) for values in batch["drawn"]]
            one.close()
        first = first or drawn  # type: ignore[assignment]
        assert drawn == first
    assert len({tuple(values) for values in first.values()}) == 2 * SAMPLES


def test_on_more_ranks_a_sample_is_augmented_as_on_one() -> None:
    def drawn(ranks: int) -> dict[int, Any]:
        return {
            index: [float(values[place]) for values in batch["drawn"]]
            for rank in range(ranks)
            for micro, batch in loader(rank, ranks)(0)
            for place, index in enumerate(micro.indices)
        }

    assert drawn(3) == drawn(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_trainings_random_numbers_alone(workers: int) -> None:
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    one = loader(num_workers=workers)
    assert len(list(one(0))) == 4
    one.close()
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_torchdatas_loader_works_with_another_number_of_workers_on_resume() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="not run: torchdata is not installed")
    stateful = torchdata.StatefulDataLoader
    assert whole_epochs(walk([(2, 2)], loader_class=stateful, num_workers=2)) == 0
    undisturbed = [batch["index"].tolist() for step in range(4) for _, batch in loader()(step)]
    seen: list[Any] = []
    for first, workers in ((0, 2), (2, 1)):
        one = loader(loader_class=stateful, num_workers=workers)
        one.batches.seek(first, one.batches.state_at(first))
        seen += [batch["index"].tolist() for step in (first, first + 1) for _, batch in one(step)]
        assert type(one._loaded).__module__.startswith("torchdata")
        one.close()
    assert seen == undisturbed


def test_the_state_of_a_loader_of_ones_own_is_refused_since_it_is_one_ranks() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="not run: torchdata is not installed")
    own = torchdata.StatefulDataLoader(Numbers())
    with Run() as run, pytest.raises(ConfigError, match="position of one rank"):
        run.register(model=programs.make_model(), loader=own)


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"])
def test_options_that_decide_what_the_run_decides_are_refused(option: str) -> None:
    batches = make_batches(
        9, 3, 1, rank=0, ranks=1, seed=0, shuffle=True, drop_last=False, dataset="", deal="even", reduce="mean"
    )
    with pytest.raises(ConfigError, match=f"run.loader\\({option}=…\\)"):
        Loader(batches, Numbers(9), seed=0, **{option: 1})


def test_an_iterator_alone_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with Run(folder=tmp_path) as run, pytest.raises(ConfigError, match="cannot be continued on another number of ranks"):
        run.loader(iter(range(9)), 3)


def test_another_data_set_on_resume_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_world(2, programs.train_loaded, 2, run_dir=tmp_path)
    with pytest.raises(RankError, match="trained on another data set") as caught:
        run_world(2, programs.train_loaded, 4, "other text", run_dir=tmp_path, attempt=2)
    assert caught.value.kind == "ConfigError"


def test_through_real_worlds_with_workers_each_epoch_has_each_sample_once(tmp_path: Path) -> None:
    """4 → 3 → 2 → 4 ranks, checkpoints in mid-epoch, twice in one."""
    trained: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for attempt, (world, total) in enumerate([(4, 2), (3, 4), (2, 5), (4, 9)], 1):
        for one in run_world(world, programs.train_loaded, total, run_dir=tmp_path, attempt=attempt):
            for epoch, samples in one["trained"].items():
                trained.setdefault(epoch, []).extend(samples)
        losses |= one["loss"]
    assert whole_epochs(trained, 50) == 1
    (alone,) = run_world(1, programs.train_loaded, 9, run_dir=tmp_path / "alone")
    assert losses.keys() == alone["loss"].keys()
    assert losses == pytest.approx(alone["loss"], rel=1e-5)
