"""Corruption, first class: files, manifest and index fit each other, and the state is not the one whose digest was recorded.

The digest names the tensor, and the run goes on from the newest good checkpoint, in one go, as if the bad one had never been.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.observe.events import read_events

from . import programs
from .forge import Forgery, forged
from .worlds import run_world

EVERY_3: dict[str, Any] = {"checkpoint": {"every_steps": 3, "every_min": None, "keep_last": 9}}
FIRST, LAST = "model.0.weight", "model.3.weight"
MOMENT, SECOND = "optimizer.state.model.0.weight.exp_avg", "optimizer.state.model.0.weight.exp_avg_sq"


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    close()


def close() -> None:
    if Run._current is not None:
        Run._current.close()


def attempt(folder: Path, total: int) -> dict[str, Any]:
    close()
    torch.manual_seed(0)
    return programs.train(total, folder=str(folder), settings=EVERY_3, dropout=0.2)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run of six steps with checkpoints at three and six, and the losses of one that went on to eight."""
    whole = attempt(tmp_path_factory.mktemp("whole"), 8)["loss"]
    folder = tmp_path_factory.mktemp("honest")
    attempt(folder, 6)
    close()
    return folder, whole


def _swapped_layers(it: Forgery) -> None:
    one, other = it.tensors["model.0.bias"], it.tensors["optimizer.state.model.0.bias.exp_avg"]
    it.tensors["model.0.bias"], it.tensors["optimizer.state.model.0.bias.exp_avg"] = other, one


def _stale_moments(it: Forgery) -> None:
    older = Forgery(next(it.directory.parent.glob("step-00000003-*")))
    for key in it.tensors:
        if key.startswith("optimizer.state."):
            it.tensors[key] = older.tensors[key]


def _zeroed_second_moment(it: Forgery) -> None:
    it.tensors[SECOND].zero_()


def _nan(it: Forgery) -> None:
    it.tensors[LAST][1, 1] = torch.nan


def _mantissa_bit(it: Forgery) -> None:
    it.tensors[FIRST].view(torch.int32)[3, 4] ^= 1


def _swapped_rows(it: Forgery) -> None:
    it.tensors[FIRST][[2, 5]] = it.tensors[FIRST][[5, 2]]


def _other_dtype(it: Forgery) -> None:
    it.tensors[MOMENT] = it.tensors[MOMENT].to(torch.bfloat16)


def _other_shape(it: Forgery) -> None:
    it.tensors[MOMENT] = it.tensors[MOMENT].T.contiguous()


def _missing(it: Forgery) -> None:
    for key in [key for key in it.tensors if key.startswith("optimizer.state.")]:
        del it.tensors[key]


@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        (_swapped_layers, "model.0.bias holds other bits; optimizer.state.model.0.bias.exp_avg holds other bits"),
        (_stale_moments, "optimizer.state.model.0.bias.exp_avg holds other bits"),
        (_zeroed_second_moment, f"{SECOND} holds other bits"),
        (_nan, f"{LAST} holds other bits"),
        (_mantissa_bit, f"{FIRST} holds other bits"),
        (_swapped_rows, f"{FIRST} holds other bits"),
        (_other_dtype, f"{MOMENT} is bfloat16 (39, 13), was float32 (39, 13)"),
        (_other_shape, f"{MOMENT} is float32 (13, 39), was float32 (39, 13)"),
        (_missing, "optimizer.state.model.0.bias.exp_avg is missing"),
    ],
)
def test_the_digest_names_the_tensor_and_the_run_goes_back_in_one_go(
    tmp_path: Path, honest: tuple[Path, dict[int, float]], corrupt: Callable[[Forgery], None], named: str
) -> None:
    folder, whole = honest
    shutil.copytree(folder, tmp_path / "run")
    with forged(tmp_path / "run" / "checkpoints") as it:
        corrupt(it)
    out = attempt(tmp_path / "run", 8)
    assert out["start"] == 3
    assert out["loss"] == {step: whole[step] for step in (4, 5, 6, 7, 8)}, "what was refused has left something behind"
    ((step, reason),) = out["rejected"]
    assert step == 6
    assert "state digest" in reason
    assert named in reason
    bad, *rest = sorted(CheckpointStore.open(tmp_path / "run" / "checkpoints").entries(), key=lambda entry: entry.step != 6)
    quarantined = [entry for entry in (bad, *rest) if not entry.usable]
    assert [entry.step for entry in quarantined] == [6]
    assert named in quarantined[0].reason
    verified = next(entry for entry in rest if entry.step == 3)
    assert str(verified.state) == "verified"
    assert "1 rank" in verified.by
    (told,) = [fact for fact in read_events(tmp_path / "run") if fact["event"] == "checkpoint_quarantined"]
    assert told["reason"] == reason


def test_a_false_alarm_can_be_taken_back(tmp_path: Path, honest: tuple[Path, dict[int, float]]) -> None:
    folder, whole = honest
    shutil.copytree(folder, tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    store = CheckpointStore.open(root)
    newest = store.latest()
    assert newest is not None
    store.quarantine(newest, "state digest: a mistake", "a test")
    store.release(next(entry for entry in store.entries() if entry.step == 6))
    assert attempt(tmp_path / "run", 8)["loss"] == {step: whole[step] for step in (7, 8)}


def test_a_checkpoint_without_a_digest_is_inconclusive_and_loads(tmp_path: Path, honest: tuple[Path, dict[int, float]]) -> None:
    folder, whole = honest
    shutil.copytree(folder, tmp_path / "run")
    with forged(tmp_path / "run" / "checkpoints") as it:
        del it.plain["digest"]
    out = attempt(tmp_path / "run", 8)
    assert out["loss"] == {step: whole[step] for step in (7, 8)}
    assert out["checks"]["state digest"].verdict == "inconclusive"


# -- several ranks --------------------------------------------------------------------------------------------------


def one_copy_is_odd(total: int, kind: str, at: str) -> dict[str, Any]:
    """Rank 1 flips a bit of one copy: right after it has loaded step 4, or right before a save."""
    import torch

    from slurm_resilience import Run
    from slurm_resilience.training.state import Registry

    run = Run.current()
    run.init_process_group()
    model = programs.make_even_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.register(model=model, optimizer=optimizer)

    def flip() -> None:
        value = next(model.parameters())
        local = value.to_local() if hasattr(value, "to_local") else value.data
        local.view(torch.int32).view(-1)[0] ^= 1

    restore = Registry.restore

    def restore_and_flip(self: Any, saved: Any, tensors: Any) -> None:
        restore(self, saved, tensors)
        if saved["counters"]["step"] == 4 and run.rank == 1:
            flip()

    if at == "load":
        Registry.restore = restore_and_flip  # type: ignore[method-assign]
    start = run.resume()
    for step in run.steps(total):
        optimizer.zero_grad()
        model(torch.ones(2, 12)).pow(2).mean().backward()
        optimizer.step()
        if at == "save" and step == 3 and run.rank == 1:
            flip()
    assert run.resumed is None or run.resumed.step == start
    return {"start": start, "rejected": [(e.step, why) for e, why in run.resumed.rejected] if run.resumed else []}


@pytest.mark.parametrize(("ranks", "kind"), [(2, "ddp"), (4, "hsdp")])
def test_one_copy_that_differs_is_named_with_its_rank(tmp_path: Path, ranks: int, kind: str) -> None:
    """The copies of a tensor are the same on all ranks after a load, and, but for silent corruption, before a save."""
    settings = {"checkpoint": {"every_steps": 2, "every_min": None, "keep_last": 9}}
    started = run_world(ranks, one_copy_is_odd, 4, kind, "", run_dir=tmp_path, settings=settings)
    assert {one["start"] for one in started} == {0}
    for one in run_world(ranks, one_copy_is_odd, 4, kind, "load", run_dir=tmp_path, settings=settings, attempt=2):
        assert one["start"] == 2
        ((step, reason),) = one["rejected"]
        assert step == 4
        assert "copies that differ: expected [], measured ['model.0.weight on rank 1']" in reason
