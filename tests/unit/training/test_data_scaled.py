"""The explicit other choice: the batch follows the world and the learning rate the batch, said aloud, and never in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ConfigError
from slurm_resilience.runtime.planner import place
from slurm_resilience.training.scaled import ScaledRate

from . import programs
from .worlds import RankError, run_world, start


def configured(rule: str | None = "linear") -> ResilienceConfig:
    return ResilienceConfig.build(
        {"nodes": (2, 4), "global_batch": 16, "micro_batch": 2, "keep_accumulation": rule, "checkpoint": {"every_min": None}}
    )


def ranks_settings(config: ResilienceConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("global_batch", "micro_batch", "keep_accumulation")}


def test_a_batch_and_a_rate_that_follow_the_world(tmp_path: Path) -> None:
    """4 → 2 → 4 nodes: accumulation stays 2, batch and rate are halved, and the schedule knows nothing of it."""
    config = configured()
    seen: dict[int, dict[str, Any]] = {}
    facts = []
    for attempt, (world, total) in enumerate([(4, 2), (2, 4), (4, 6)], 1):
        plan = place([f"n{rank}" for rank in range(world)], config).plan
        started = start(
            world, programs.train_scaled, total, run_dir=tmp_path, attempt=attempt, settings=ranks_settings(config), plan=plan
        )
        results = started.results()
        seen |= results[0]["steps"]
        facts += [fact["fields"] for fact in started.of("learning_rate_scaled")]
        assert results[0]["trained"] == results[0]["expected"]
    assert [one["passes"] for one in seen.values()] == [2] * 6
    assert [one["samples"] for one in seen.values()] == [16, 16, 8, 8, 16, 16]
    # what was used is the difference of two weights in fp32
    assert [one["used"] / one["scheduled"] for one in seen.values()] == pytest.approx([1, 1, 0.5, 0.5, 1, 1], rel=1e-5)
    assert [one["scheduled"] for one in seen.values()] == pytest.approx([0.1 * 0.9**step for step in range(6)])
    assert facts == [
        {"rule": "linear", "factor": factor, "global_batch": batch} for factor, batch in ((1.0, 16), (0.5, 8), (1.0, 16))
    ]


def test_the_rule_and_the_default() -> None:
    two = ["n0", "n1"]
    assert place(two, configured("sqrt")).plan["lr_factor"] == pytest.approx(0.5**0.5)
    assert place(two, configured("none")).plan["lr_factor"] == 1.0
    assert place(two, configured("none")).plan["global_batch"] == 8
    assert place(two, configured(None)).plan["global_batch"] == 16
    with pytest.raises(ConfigError, match="keep_accumulation"):
        configured("cubic")


def test_what_would_do_nothing_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_accumulation=linear without global_batch would do nothing"):
        ResilienceConfig.build({"keep_accumulation": "linear"})
    with pytest.raises(ConfigError, match="has no batch to scale"):
        ScaledRate.of_plan({"global_batch": None}, "linear")
    config = configured()
    plan = place(["n0", "n1"], config).plan
    with pytest.raises(RankError, match=r"nothing to act on.*neither run.batches\(\) nor run.loader\(\)") as caught:
        run_world(1, programs.train_scaled, 2, False, run_dir=tmp_path, settings=ranks_settings(config), plan=plan)
    assert caught.value.kind == "ConfigError"


@pytest.mark.parametrize("in_a_tensor", [False, True])
def test_the_rate_is_another_one_in_the_update_alone(in_a_tensor: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.1) if in_a_tensor else 0.1
    optimizer = torch.optim.Adam([{"params": [weight], "lr": rate}], foreach=False, capturable=False)
    optimizer.param_groups[0]["lr"] = rate
    ScaledRate("linear", 0.5, 8).drive({"optimizer": optimizer})
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.05, rel=1e-5)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert not in_a_tensor or optimizer.param_groups[0]["lr"] is rate


def test_an_update_that_raises_does_not_scale_twice() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ScaledRate("linear", 0.5, 8).drive({"optimizer": optimizer})

    def fails() -> float:
        raise RuntimeError("in the closure")

    with pytest.raises(RuntimeError):
        optimizer.step(fails)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.05)
    assert optimizer.param_groups[0]["lr"] == 0.1
