"""An optimizer's state goes into a checkpoint and comes back without a hidden step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim import lr_scheduler as lr

from slurm_resilience.checkpoint.errors import MismatchedCheckpoint
from slurm_resilience.errors import ConfigError
from slurm_resilience.training import optimizer as optimizers
from slurm_resilience.training.layout import Layout
from slurm_resilience.training.state import Registry

from . import programs

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: AdamW(groups, lr=1e-2),
    "adam_l2": lambda groups: Adam(groups, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": lambda groups: SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "nadam": lambda groups: NAdam(groups, lr=1e-2),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=50),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=8), lr.CosineAnnealingLR(o, 40)], [8]),
    "chained": lambda o: lr.ChainedScheduler([lr.LinearLR(o, 0.1, total_iters=30), lr.ExponentialLR(o, 0.99)]),
    "onecycle": lambda o: lr.OneCycleLR(o, max_lr=1e-1, total_steps=60),
    "step": lambda o: lr.MultiStepLR(o, [5, 7, 30]),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=2),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 7, 2),
    "linear": lambda o: lr.LinearLR(o, 0.1, total_iters=40),
    "polynomial": lambda o: lr.PolynomialLR(o, 50),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.97),
}


def groups_of(model: torch.nn.Module, *, swapped: bool = False) -> list[dict[str, Any]]:
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    plain = {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 5e-3}
    return [plain, decayed] if swapped else [decayed, plain]


def make(optimizer: str = "adamw", scheduler: str | None = "cosine", *, swapped: bool = False) -> Registry:
    model = programs.make_model()
    registry = Registry()
    one = OPTIMIZERS[optimizer](groups_of(model, swapped=swapped))
    registry.add({"model": model, "optimizer": one, "scheduler": SCHEDULERS[scheduler](one) if scheduler else None})
    return registry


def advance(registry: Registry, steps: int, start: int = 0) -> list[float]:
    model, one = registry.models["model"], registry.optimizers["optimizer"]
    seen = []
    for step in range(start, start + steps):
        one.zero_grad()
        x, y = programs.sample(range(4 * step, 4 * step + 4))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        one.step()
        for scheduler in registry.schedulers.values():
            scheduler.step(*([loss.item()] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
        seen += [loss.item(), *optimizers.learning_rates(one)]
    return seen


def through_a_checkpoint(source: Registry, target: Registry) -> None:
    """What a checkpoint keeps of one goes into the other, by way of JSON and copies."""
    taken = source.capture()
    saved = json.loads(json.dumps(taken.plain, allow_nan=False))
    copies = {key: value.clone() for key, value in taken.tensors.items()}
    layout = Layout({key: {"shape": list(value.shape), "dtype": str(value.dtype)} for key, value in copies.items()})
    room = target.template(saved, layout)
    assert room.keys() == copies.keys()
    for key, value in room.items():
        value.copy_(copies[key])
    target.restore(saved, room)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_goes_on_exactly(scheduler: str) -> None:
    source, target = make(scheduler=scheduler), make(scheduler=scheduler)
    advance(source, 12)
    through_a_checkpoint(source, target)
    assert advance(target, 10, 12) == advance(source, 10, 12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_every_optimizer_goes_on_exactly_and_saving_changes_nothing(optimizer: str, steps: int) -> None:
    undisturbed, source, target = make(optimizer), make(optimizer), make(optimizer)
    advance(undisturbed, steps)
    advance(source, steps)
    through_a_checkpoint(source, target)
    expected = advance(undisturbed, 6, steps)
    assert advance(source, 6, steps) == expected
    assert advance(target, 6, steps) == expected


def test_gradients_that_are_present_do_not_empty_the_state() -> None:
    """Elsewhere the state was saved empty, without a word (pytorch#140898)."""
    source, target = make(), make()
    advance(source, 2)
    assert all(p.grad is not None for p in source.models["model"].parameters())
    through_a_checkpoint(source, target)
    assert len(target.optimizers["optimizer"].state) == 4


def test_a_parameter_that_was_never_trained_needs_no_state() -> None:
    source, target = make(scheduler=None), make(scheduler=None)
    for registry in (source, target):
        list(registry.models["model"].parameters())[-1].requires_grad_(False)
    advance(source, 2)
    through_a_checkpoint(source, target)
    assert advance(target, 3, 2) == advance(source, 3, 2)


def test_groups_are_matched_by_their_parameters_and_not_by_their_order() -> None:
    source, target = make(scheduler=None), make(scheduler=None, swapped=True)
    advance(source, 2)
    source.optimizers["optimizer"].param_groups[0]["lr"] = 0.5
    through_a_checkpoint(source, target)
    assert optimizers.learning_rates(target.optimizers["optimizer"]) == [5e-3, 0.5]
    assert [group["weight_decay"] for group in target.optimizers["optimizer"].param_groups] == [0.01, 0.1]


def test_other_groups_are_an_error_that_names_the_difference() -> None:
    source = make(scheduler=None)
    target = Registry()
    model = programs.make_model()
    target.add({"model": model, "optimizer": AdamW(model.parameters())})
    with pytest.raises(MismatchedCheckpoint, match=r"groups of \[4\] parameters here, of \[2, 2\] there"):
        through_a_checkpoint(source, target)


def test_a_learning_rate_in_a_tensor_stays_in_that_tensor() -> None:
    def build(rate: float) -> Registry:
        model = programs.make_model()
        registry = Registry()
        registry.add(
            {"model": model, "optimizer": AdamW(model.parameters(), lr=torch.tensor(rate), capturable=False, foreach=False)}
        )
        return registry

    source, target = build(0.25), build(0.5)
    advance(source, 1)
    through_a_checkpoint(source, target)
    rate = target.optimizers["optimizer"].param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == 0.25


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    registry = Registry()
    registry.add({"model": programs.make_model(), "optimizer": AdamW(programs.make_model().parameters())})
    with pytest.raises(ConfigError, match="trains a parameter that no registered model has"):
        registry.capture()


class _CountsOnLoad:
    """Like Megatron's scheduler: loading adds the steps to those that it has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    def get_last_lr(self) -> list[float]:
        return optimizers.learning_rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps += state["num_steps"]


def test_loading_twice_gives_what_loading_once_gives() -> None:
    def build() -> Registry:
        model = programs.make_model()
        one = AdamW(model.parameters())
        registry = Registry()
        registry.add({"model": model, "optimizer": one, "scheduler": _CountsOnLoad(one)})
        return registry

    source, target = build(), build()
    source.schedulers["scheduler"].num_steps = 5
    through_a_checkpoint(source, target)
    source.schedulers["scheduler"].num_steps = 4
    through_a_checkpoint(source, target)
    assert target.schedulers["scheduler"].num_steps == 4
