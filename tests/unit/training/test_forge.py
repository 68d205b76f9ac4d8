"""The forger leaves nothing that a check of files could see; otherwise the corruption suite would prove too little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import verify

from . import programs
from .forge import Forgery, forged
from .worlds import run_world


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forged_checkpoint_passes_every_file_check_and_holds_what_was_forged(tmp_path: Path, ranks: int) -> None:
    run_world(ranks, programs.train, 3, run_dir=tmp_path)
    root = tmp_path / "checkpoints"
    with forged(root) as it:
        before = {key: value.clone() for key, value in it.tensors.items()}
        it.tensors["model.0.weight"][1, 2] = 17.0
        it.tensors["model.0.bias"] = it.tensors["model.0.bias"].to(torch.bfloat16)
        it.plain["counters"]["step"] = 99
        own = it.own(0)
        it.set_own(0, {**own, "more": 1})
    store = CheckpointStore.open(root)
    entry = store.latest()
    assert entry is not None
    assert verify(store.path(entry), entry) == []
    again = Forgery(store.path(entry))
    same = {key for key, value in again.tensors.items() if value.shape == before[key].shape and value.equal(before[key])}
    assert before.keys() - same == {"model.0.weight", "model.0.bias", "per_rank.rank00000.json"}
    assert again.tensors["model.0.weight"][1, 2] == 17.0
    assert again.manifest.tensors["model.0.bias"]["dtype"] == "bfloat16"
    assert again.plain["counters"]["step"] == 99
    assert again.own(0) == {**own, "more": 1}
