"""What was read as it was saved needs no sums; whatever differs, or cannot be told, is summed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience.checkpoint import dcp
from slurm_resilience.checkpoint.digest import CHUNK_BYTES
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.training import prints, state_digest
from slurm_resilience.training.as_loaded import AsLoaded

from . import programs
from .worlds import run_world

LARGE = CHUNK_BYTES // 4096 + 3  # rows of 4 KiB: more than one chunk, and a part of one


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "large": torch.randn(LARGE, 1024),
        "half": torch.randn(90, 70).to(torch.bfloat16),
        "odd": torch.full((40, 40), torch.nan),
        "wide": torch.randn(64, 64).t(),
        "tiny": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


def loaded(folder: Path, held: dict[str, torch.Tensor], room: dict[str, torch.Tensor]) -> prints.Prints:
    """What is known after ``room`` was loaded from a checkpoint of :func:`state`, whose digest says that it was ``held``."""
    store = CheckpointStore.open(folder, attempt=1)
    store.fence()
    entry = dcp.save(store, dict(state()), step=1)
    kept = state_digest.kept(state_digest.join([state_digest.part_of(held, printed=True)]))
    watch = state_digest.watch(kept, room)
    dcp.load(store, entry, dict(room), watch=watch)
    return watch


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state().items()}


def test_what_was_read_as_it_was_saved_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = empty()
    watch = loaded(tmp_path, state(), room)
    assert watch.sums.keys() == {"large", "half", "odd", "tiny"}
    rows = AsLoaded(room, lambda key: False, watch.sums).rows
    assert rows == state_digest.part_of(room) == state_digest.part_of(state())
    assert [row.key for row in rows if not row.sums.finite] == ["odd"]


def flip(tensor: torch.Tensor) -> None:
    tensor.reshape(-1).view(torch.int16)[-1] ^= 1


@pytest.mark.parametrize("key", ["large", "half", "odd", "tiny"])
def test_a_copy_that_is_not_what_was_held_is_not_taken_for_it(tmp_path: Path, key: str) -> None:
    """The files' digests are valid, since the bit flipped before they were taken."""
    held, room = state(), empty()
    flip(held[key])
    watch = loaded(tmp_path, held, room)
    assert watch.sums.keys() == {"large", "half", "odd", "tiny"} - {key}
    was = state_digest.by_key(state_digest.part_of(held))
    now = state_digest.by_key(AsLoaded(room, lambda key: False, watch.sums).rows)
    assert state_digest.differences(was, now) == {key: "holds other bits"}


def test_sums_of_another_box_are_not_taken(tmp_path: Path) -> None:
    held, room = state(), empty()
    kept = state_digest.kept(state_digest.join([state_digest.part_of(held, printed=True)]))
    assert kept["boxes"]["large"][0][:2] == [[0, 0], [LARGE, 1024]]
    kept["boxes"]["large"][0][0] = [1, 0]
    watch = state_digest.watch(kept, room)
    ((_, _, print_, _, _),) = kept["boxes"]["half"]
    assert print_ == prints.of(held["half"])
    for key in ("large", "half"):
        watch(key, room[key], _chunks(held[key]))
    assert watch.sums.keys() == {"half"}


def _chunks(tensor: torch.Tensor) -> str:
    from slurm_resilience.checkpoint import digest

    return digest.digest(tensor.view(torch.uint8).reshape(-1).numpy().data)


@pytest.mark.parametrize("how", ["elsewhere", "not in one piece", "shared", "side by side"])
def test_memory_that_may_hold_something_else_is_summed(tmp_path: Path, how: str) -> None:
    room: dict[str, Any] = empty()
    if how == "not in one piece":
        room["large"] = torch.zeros(1024, LARGE).t()
    if how == "shared":
        memory = torch.zeros(LARGE + 89, 1024)
        room["large"], room["other"] = memory[:LARGE], memory[LARGE - 1 :]
    if how == "side by side":
        memory = torch.zeros(LARGE + 90, 1024)
        room["large"], room["other"] = memory[:LARGE], memory[LARGE:]
    store = CheckpointStore.open(tmp_path, attempt=1)
    store.fence()
    held = {**state(), "other": torch.zeros(90, 1024)}
    entry = dcp.save(store, dict(held), step=1)
    kept = state_digest.kept(state_digest.join([state_digest.part_of(held, printed=True)]))
    watch = state_digest.watch(kept, room)
    if how == "elsewhere":
        room = {**room, "large": torch.zeros(LARGE, 1024)}
    dcp.load(store, entry, dict(room), watch=watch, strict=False)
    assert watch.sums.keys() - {"odd", "tiny"} == ({"large", "half", "other"} if how == "side by side" else {"half"})
    assert room["large"][:-1].equal(held["large"][:-1])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_that_resumes_on_the_same_mesh_sums_nothing(tmp_path: Path, kind: str) -> None:
    assert run_world(2, programs.sums_taken, kind, 1, run_dir=tmp_path) == [0, 0]
    assert run_world(2, programs.sums_taken, kind, 2, run_dir=tmp_path, attempt=2) == [0, 0]
    summed = run_world(3, programs.sums_taken, kind, 3, run_dir=tmp_path, attempt=3)
    assert summed == [0, 0, 0] if kind == "ddp" else min(summed) > 0
