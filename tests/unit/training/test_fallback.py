"""What happens when a checkpoint is refused: how far back the run goes, what is loaded again, and who is asked.

The numbers of cases are those of a list of failures that other systems have had.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import NoValidCheckpoint

from . import programs
from .forge import forged

EVERY_2: dict[str, Any] = {"checkpoint": {"every_steps": 2, "every_min": None, "keep_last": 9}}


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    close()


def close() -> None:
    if Run._current is not None:
        Run._current.close()


def attempt(folder: Path, total: int, **verify: Any) -> dict[str, Any]:
    close()
    torch.manual_seed(0)
    return programs.train(total, folder=str(folder), settings={**EVERY_2, "verify": verify}, dropout=0.2, probe=True)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run of six steps with checkpoints at two, four and six, and the losses of one that went on to eight."""
    whole = attempt(tmp_path_factory.mktemp("whole"), 8)["loss"]
    folder = tmp_path_factory.mktemp("honest")
    attempt(folder, 6)
    close()
    return folder, whole


@pytest.fixture
def root(tmp_path: Path, honest: tuple[Path, dict[int, float]]) -> Path:
    shutil.copytree(honest[0], tmp_path / "run")
    return tmp_path / "run" / "checkpoints"


def spoil(root: Path, *steps: int) -> None:
    for step in steps:
        with forged(root, step=step) as it:
            it.tensors["model.0.weight"][0, 0] += 1


def test_one_resume_goes_back_over_several_at_once(root: Path, honest: tuple[Path, dict[int, float]]) -> None:
    spoil(root, 6, 4)
    out = attempt(root.parent, 8)
    assert [step for step, _ in out["rejected"]] == [6, 4]
    assert out["loss"] == {step: honest[1][step] for step in range(3, 9)}


def test_number_and_time_of_refusals_are_bounded(root: Path) -> None:
    spoil(root, 6, 4)
    with pytest.raises(NoValidCheckpoint, match=r"1 checkpoints could not be trusted .*no more are tried"):
        attempt(root.parent, 8, most_entries=1)
    with pytest.raises(NoValidCheckpoint, match=r"1 checkpoints could not be trusted .*no more are tried"):
        attempt(root.parent, 8, most_s=1e-9)
    assert attempt(root.parent, 8)["start"] == 2


def test_a_fresh_start_is_as_fresh_as_the_first_one_and_only_by_wish(root: Path, honest: tuple[Path, dict[int, float]]) -> None:
    spoil(root, 6, 4, 2)
    shutil.copytree(root.parent, root.parent.with_name("other"))
    with pytest.raises(NoValidCheckpoint, match="None of the 3 checkpoints"):
        attempt(root.parent.with_name("other"), 8)
    out = attempt(root.parent, 8, start_fresh=True)
    assert out["start"] == 0
    assert out["loss"] == honest[1]


def test_case_2_and_3_generators_that_refuse_their_state_condemn_the_entry(root: Path) -> None:
    """Cases 2 and 3: a failing restore of random numbers, NumPy's among them, is fatal for the entry and never skipped."""
    with forged(root, digest=True) as it:
        key = next(key for key in it.tensors if key.endswith(".t:rng"))
        it.tensors[key] = it.tensors[key][: it.tensors[key].numel() // 2].clone()
    out = attempt(root.parent, 7)
    ((step, reason),) = out["rejected"]
    assert (step, out["start"]) == (6, 4)
    assert "rng" in reason


def test_case_12_counters_that_disagree_by_one_condemn_the_entry(root: Path) -> None:
    """Case 12: the counters that were restored are not the entry's."""
    with forged(root, digest=True) as it:
        it.plain["counters"]["step"] -= 1
    out = attempt(root.parent, 7)
    ((step, reason),) = out["rejected"]
    assert (step, out["start"]) == (6, 4)
    assert "step: expected 6, measured 5" in reason


def test_case_11_one_that_killed_its_reader_is_passed_over(root: Path) -> None:
    """Case 11: an attempt that began to load it never said how that ended."""
    store = CheckpointStore.open(root, attempt=2)
    store.fence()
    newest = store.latest()
    assert newest is not None
    store.mark_attempted(newest)
    assert attempt(root.parent, 7)["start"] == 4


class _Adds(torch.optim.lr_scheduler.LambdaLR):
    """Adds the steps that it loads to those that it has, as Megatron's scheduler does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1 / (1 + step))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        had = self.last_epoch
        super().load_state_dict(state)
        self.last_epoch += had


def test_case_4_a_scheduler_that_adds_what_it_loads_counts_once_after_a_rollback(tmp_path: Path) -> None:
    """Case 4: the second load gives the same state as the first."""

    def go(total: int) -> tuple[int, int]:
        close()
        run = Run(folder=tmp_path, **EVERY_2)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = _Adds(optimizer)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        start = run.resume()
        resumed_at = scheduler.last_epoch
        for _ in run.steps(total):
            optimizer.step()
            scheduler.step()
        return start, resumed_at

    go(4)
    with forged(tmp_path / "checkpoints") as it:
        it.tensors["model.weight"] += 1
    assert go(4) == (2, 2)
