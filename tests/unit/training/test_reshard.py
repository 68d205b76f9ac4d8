"""Whatever mesh a run was saved on, it is restored bit by bit on any other: parameters and the optimizer's moments."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from slurm_resilience.checkpoint.digest import CHUNK_BYTES

from . import programs
from .worlds import run_world

MESHES = [(1, "one"), (2, "ddp"), (2, "fsdp"), (2, "tp"), (3, "ddp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp"), (4, "tp_fsdp")]
QUICK = {
    ((4, "tp_fsdp"), (3, "fsdp")),
    ((3, "fsdp"), (4, "tp_fsdp")),
    ((4, "hsdp"), (2, "tp")),
    ((1, "one"), (4, "hsdp")),
    ((2, "tp"), (1, "one")),
}
PAIRS = [
    pytest.param(
        *pair, marks=() if pair in QUICK else pytest.mark.long, id=f"{pair[0][1]}{pair[0][0]}-{pair[1][1]}{pair[1][0]}"
    )
    for pair in itertools.product(MESHES, MESHES)
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_tensor_is_restored_bit_by_bit(tmp_path: Path, before: tuple[int, str], after: tuple[int, str]) -> None:
    (_, saved), *_ = run_world(before[0], programs.whole_state, before[1], 3, run_dir=tmp_path)
    for resumed, _ in run_world(after[0], programs.whole_state, after[1], 4, run_dir=tmp_path, attempt=2):
        assert len(resumed) == 16
        assert resumed == saved


@pytest.mark.parametrize(
    "meshes",
    [
        [(3, "fsdp"), (4, "fsdp"), (2, "ddp"), (3, "compiled_fsdp"), (1, "one")],
        pytest.param([(1, "compiled"), (4, "fsdp"), (3, "fsdp"), (2, "fsdp"), (4, "ddp"), (1, "one")], marks=pytest.mark.long),
    ],
    ids=lambda meshes: "-".join(f"{kind}{world}" for world, kind in meshes),
)
def test_odd_sizes_tied_and_frozen_weights_buffers_averages_and_two_optimizers(
    tmp_path: Path, meshes: list[tuple[int, str]]
) -> None:
    """50,257 rows over 3 ranks, a bias of 5 over 4: bit by bit, through any wrapper."""
    saved: dict[str, str] = {}
    for attempt, (world, kind) in enumerate(meshes, 1):
        results = run_world(world, programs.rich_state, kind, 2 * attempt, run_dir=tmp_path, attempt=attempt)
        for resumed, _ in results:
            assert not saved or resumed == saved
        changed, saved = saved, results[0][1]
        moments = [key for key in saved if key.endswith((" exp_avg", " exp_avg_sq", " momentum_buffer"))]
        assert len(moments) == 6 * 2 + 1
        assert "ema embed.weight" in saved
        assert "model norm.running_mean" in saved
        assert all(saved[key] != changed[key] for key in moments if changed), "nothing was trained"
        assert saved["model frozen.weight"] == changed.get("model frozen.weight", saved["model frozen.weight"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "fsdp"), (3, "fsdp")),
        pytest.param((4, "tp_fsdp"), (3, "fsdp"), marks=pytest.mark.long),
        pytest.param((3, "fsdp"), (4, "tp_fsdp"), marks=pytest.mark.long),
        pytest.param((4, "hsdp"), (2, "tp"), marks=pytest.mark.long),
    ],
    ids=["fsdp4-fsdp3", "tp_fsdp4-fsdp3", "fsdp3-tp_fsdp4", "hsdp4-tp2"],
)
def test_loading_needs_the_new_shard_and_a_bounded_buffer(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """54 MiB of parameters that are there already, and twice as much of moments that are new; no copy of either."""
    block = CHUNK_BYTES
    run_world(before[0], programs.load_memory, before[1], 1, block, run_dir=tmp_path)
    for rank in run_world(after[0], programs.load_memory, after[1], 1, block, run_dir=tmp_path, attempt=2):
        assert rank["moments"] > 25 << 20
        assert rank["peak"] >= rank["moments"] * 0.9, "nothing was loaded, or not measured"
        assert rank["peak"] - rank["moments"] <= 4 * block, "as if a shard were held twice"
