"""A mean over tokens: unequal counts, a last partial window, any number of ranks, and the gradient of one process."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.elastic import MeshConstraints, plan_mesh
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.data import Batches, make_batches, scale_loss
from slurm_resilience.training.identity import Identity

SAMPLES, WHOLE = 23, 10


def tokens_of(sample: int) -> int:
    """Labels that count; some samples have none."""
    return sample * 7 % 5


def batches(rank: int, ranks: int, reduce: Any) -> Batches:
    return make_batches(
        SAMPLES, WHOLE, 3, rank=rank, ranks=ranks, seed=1, shuffle=True, drop_last=False, dataset="", deal="even", reduce=reduce
    )


def loss(weight: torch.Tensor, indices: tuple[int, ...], reduction: str) -> torch.Tensor:
    """Cross entropy over the tokens of some samples, most of them padded."""
    inputs = torch.stack([torch.randn(4, 6, generator=torch.Generator().manual_seed(index)) for index in indices])
    targets = torch.tensor([[(index + at) % 5 if at < tokens_of(index) else -100 for at in range(4)] for index in indices])
    return torch.nn.functional.cross_entropy((inputs @ weight).flatten(0, 1), targets.flatten(), reduction=reduction)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_gradient_is_that_of_one_process_also_in_a_short_last_batch(ranks: int, reduce: str) -> None:
    for step in range(3):  # the third batch of the epoch has 3 samples
        ids = batches(0, 1, reduce).global_ids(step)
        whole = torch.ones(6, 5, dtype=torch.float32, requires_grad=True)
        loss(whole, ids, "mean").backward()
        total = sum(map(tokens_of, ids))
        summed = torch.zeros(6, 5)
        for rank in range(ranks):
            mine = torch.ones(6, 5, requires_grad=True)
            for micro in batches(rank, ranks, reduce)(step):
                count = sum(map(tokens_of, micro.indices))
                scale_loss(
                    loss(mine, micro.indices, "sum"), micro, reduction="sum", tokens=count, total_tokens=total
                ).backward()
                if count:
                    mean = scale_loss(loss(mine, micro.indices, "mean"), micro, tokens=torch.tensor(count), total_tokens=total)
                    other = scale_loss(
                        loss(mine, micro.indices, "sum"), micro, reduction="sum", tokens=count, total_tokens=total
                    )
                    assert torch.allclose(mean, other)
            summed += mine.grad  # type: ignore[arg-type]
        if reduce == "mean":
            summed /= ranks
        assert whole.grad is not None
        assert torch.allclose(summed, whole.grad, rtol=1e-5, atol=1e-7)


def test_counts_that_make_no_sense_are_refused() -> None:
    micro = next(iter(batches(0, 1, "mean")(0)))
    with pytest.raises(ConfigError, match="needs tokens= and total_tokens="):
        scale_loss(1.0, micro, tokens=3)
    with pytest.raises(ConfigError, match="without a token has no mean loss"):
        scale_loss(1.0, micro, tokens=0, total_tokens=9)
    with pytest.raises(ConfigError, match="10 out of 9 has no weight"):
        scale_loss(1.0, micro, tokens=10, total_tokens=9)


def test_ranks_that_share_samples_are_counted_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(folder=tmp_path) as run:
        assert run.total_tokens(7) == 7
        monkeypatch.setattr(type(run), "mesh", property(lambda self: {"dp_shard": 2, "tp": 4}))
        monkeypatch.setattr(type(run), "world_size", property(lambda self: 8))
        monkeypatch.setattr(run, "sum", lambda mine: 4 * (3 + 5))
        assert run.total_tokens(3) == 8


def test_ranks_that_were_told_to_share_samples_are_counted_once_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun there is no plan with a mesh: the script says how its ranks lie."""
    with Run(folder=tmp_path) as run:
        monkeypatch.setattr(type(run), "world_size", property(lambda self: 8))
        monkeypatch.setattr(run, "sum", lambda mine: 4 * (3 + 5))
        run.batches(16, 8, 2, dp_rank=1, dp_ranks=2)
        assert run.total_tokens(3) == 8


def test_a_total_that_was_summed_in_floats_is_not_cut_down() -> None:
    micro = next(iter(batches(0, 1, "mean")(0)))
    assert scale_loss(1.0, micro, tokens=1, total_tokens=8.9999999) == scale_loss(1.0, micro, tokens=1, total_tokens=9)


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "dp_shard": 3, "tp": 2}, {"pp": 2, "dp_shard": 2, "cp": 3}, {"tp": 4}])
def test_a_rank_finds_its_share_of_the_batch_where_the_mesh_has_put_it(axes: dict[str, int]) -> None:
    """Ranks are row-major over (pp, dp_replicate, dp_shard, cp, tp), as torch's device mesh has them."""
    ranks = prod(axes.values())
    plan = plan_mesh(ranks, MeshConstraints.of(**axes))
    for rank in range(ranks):
        run = SimpleNamespace(rank=rank, mesh=plan.axes, dp_ranks=plan.dp_ranks)
        at = plan.coordinates(rank)
        assert Identity.dp_rank.fget(run) == at["dp_replicate"] * plan.axes["dp_shard"] + at["dp_shard"]  # type: ignore[attr-defined]
