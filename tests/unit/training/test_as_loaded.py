"""What was not written to since it was loaded is what it was; whatever was is summed again, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.training import optimizer as optimizers
from slurm_resilience.training import state_digest
from slurm_resilience.training.as_loaded import AsLoaded

from . import programs

EVERY_2: dict[str, Any] = {"every_steps": 2, "every_min": None, "keep_last": 9}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "a": torch.randn(70, 90),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.tensor(3.0),
        "d": torch.randn(8, 6).T,
        "e": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("written", [False, True])
def test_what_nobody_wrote_to_has_the_sums_that_it_had(written: bool) -> None:
    there = tensors()
    loaded = AsLoaded(there, lambda key: written)
    assert loaded.now(dict(there)) is loaded.rows
    assert state_digest.by_key(loaded.rows) == state_digest.by_key(state_digest.part_of(there))


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "in place": lambda it: it["a"].mul_(2),
    "one bit": lambda it: it["a"].view(torch.int32)[3, 4].bitwise_xor_(1),
    "through a view": lambda it: it["a"][2].add_(1),
    "another tensor": lambda it: it.update(a=it["a"] + 1),
    "the other half": lambda it: it.update(d=it["d"].flip(0)),
    "another type": lambda it: it.update(b=it["b"].float()),
    "gone": lambda it: it.pop("c"),
    "new": lambda it: it.update(f=torch.ones(2)),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changed_is_seen(change: Callable[[dict[str, torch.Tensor]], Any], written: bool) -> None:
    there = tensors()
    loaded = AsLoaded(there, lambda key: written)
    change(there)
    now = state_digest.by_key(loaded.now(there))
    assert now == state_digest.by_key(state_digest.part_of(there))
    assert now != state_digest.by_key(loaded.rows)


def test_writes_that_torch_does_not_count_are_seen_where_they_must_be_feared() -> None:
    there = tensors()
    loaded = AsLoaded(there, lambda key: True)
    there["a"].data.mul_(2)
    assert state_digest.by_key(loaded.now(there)) == state_digest.by_key(state_digest.part_of(there))


def test_only_torchs_own_optimizers_without_hooks_take_what_they_are_given() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    own = torch.optim.AdamW([parameter])
    assert optimizers.takes_as_given(own)
    own.register_load_state_dict_post_hook(lambda one: None)
    assert not optimizers.takes_as_given(own)
    assert not optimizers.takes_as_given(_Doubles([parameter]))


class _Doubles(torch.optim.Adam):
    """Doubles its moments whenever it loads, in a way that torch does not count."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for one in self.state.values():
            one["exp_avg"].data.mul_(2)


def train(folder: Path, total: int, optimizer: Callable[[Any], torch.optim.Optimizer], **settings: Any) -> dict[str, Any]:
    """Losses by step, and how the run came back."""
    torch.manual_seed(0)
    with Run(folder=folder, checkpoint=EVERY_2, **settings) as run:
        model = programs.make_model(0.2)
        made = optimizer(model.parameters())
        run.register(model=model, optimizer=made)
        batches = run.batches(101, 22, 3)
        run.probe(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), *programs.sample(range(4)))
        run.resume()
        losses = {}
        for step in run.steps(total):
            made.zero_grad()
            mean = 0.0
            for micro in batches(step):
                x, y = programs.sample(micro.indices)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                run.scale_loss(loss, micro).backward()
                mean += float(loss.detach()) * micro.weight
            made.step()
            losses[step + 1] = mean
            run.report(loss=mean)
        return {"loss": losses, "resumed": run.resumed}


def test_an_optimizer_that_changes_what_it_loads_is_to_blame_and_not_the_checkpoint(tmp_path: Path) -> None:
    from slurm_resilience.checkpoint.store import CheckpointStore
    from slurm_resilience.errors import CheckpointError

    train(tmp_path, 4, torch.optim.Adam)
    with pytest.raises(CheckpointError, match=r"Objects hold other state than they were given: .*exp_avg holds other bits"):
        train(tmp_path, 6, _Doubles)
    assert all(entry.usable for entry in CheckpointStore.open(tmp_path / "checkpoints").entries())


# -- optimizers that count nothing, or keep their state in another type -----------------------------------------------


class _Low(torch.optim.Optimizer):
    """Momentum in bfloat16 beside parameters in float32, and no count of steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(moment.float() * group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "low": _Low,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_optimizer_is_blamed_for_what_it_does_not_count_or_for_its_own_types(
    tmp_path: Path, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    whole = train(tmp_path / "whole", 6, optimizer)["loss"]
    train(tmp_path / "parts", 4, optimizer)
    again = train(tmp_path / "parts", 6, optimizer)
    assert again["resumed"].step == 4
    assert again["resumed"].rejected == []
    assert {str(check.verdict) for check in again["resumed"].checks} == {"passed"}
    assert again["loss"] == {step: whole[step] for step in (5, 6)}


# -- the run that follows -----------------------------------------------------------------------------------------------


def test_the_run_after_a_verification_is_the_run_without_one_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digest, probe, replay and guard against nothing at all, which only a test can ask for."""
    from slurm_resilience.training import restoring, saving, sealing

    proved, bare = tmp_path / "proved", tmp_path / "bare"
    train(proved, 4, OPTIMIZERS["fused"])
    checked = train(proved, 8, OPTIMIZERS["fused"])
    assert {"state digest", "probe loss"} <= {check.name for check in checked["resumed"].checks}
    monkeypatch.setattr(restoring, "CHECKS", ())
    monkeypatch.setattr(restoring, "AsLoaded", lambda *_: None)
    monkeypatch.setattr(saving, "seal", lambda *_, **__: [])
    monkeypatch.setattr(sealing, "seal", lambda *_, **__: [])
    monkeypatch.setattr(Run, "probe", lambda *_: None)
    train(bare, 4, OPTIMIZERS["fused"], verify={"first_steps": 0, "next_batch": False})
    unchecked = train(bare, 8, OPTIMIZERS["fused"], verify={"first_steps": 0, "next_batch": False})
    assert unchecked["resumed"].checks == []
    assert checked["loss"] == unchecked["loss"]
    assert len(checked["loss"]) == 4
