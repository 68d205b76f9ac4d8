"""Which objects are taken in, how their parts are called, and what is said when a checkpoint is about something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from slurm_resilience.checkpoint.errors import MismatchedCheckpoint
from slurm_resilience.errors import ConfigError
from slurm_resilience.training import fqn
from slurm_resilience.training.state import Registry

from . import programs
from .test_optimizer import through_a_checkpoint


def registry(**objects: Any) -> Registry:
    made = Registry()
    made.add(objects)
    return made


def test_objects_are_told_apart_by_what_they_are() -> None:
    model = programs.make_model()
    one = torch.optim.SGD(model.parameters(), lr=1.0)
    made = registry(
        net=model, opt=one, sched=torch.optim.lr_scheduler.ConstantLR(one), scaler=torch.amp.GradScaler("cpu"), none=None
    )
    assert [list(group) for group in (made.models, made.optimizers, made.schedulers, made.others)] == [
        ["net"],
        ["opt"],
        ["sched"],
        ["scaler"],
    ]


def test_what_cannot_be_kept_is_refused_with_the_reason() -> None:
    model = programs.make_model()
    with pytest.raises(ConfigError, match="a int has no state_dict"):
        registry(counter=3)
    with pytest.raises(ConfigError, match="the same object is known as 'model'"):
        registry(model=model, again=model)
    with pytest.raises(ConfigError, match="used by the checkpoint itself"):
        registry(probe=model)
    made = registry(model=model)
    with pytest.raises(ConfigError, match="the name is taken"):
        made.add({"model": programs.make_model()})


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = programs.make_model()
    one, other = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    with pytest.raises(ConfigError, match="drives an optimizer that is not registered"):
        registry(model=model, optimizer=one, scheduler=torch.optim.lr_scheduler.ConstantLR(other))


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_checkpoint_loads_with_and_without_wrappers(wrapped_first: bool) -> None:
    def plain() -> torch.nn.Module:
        return programs.make_model()

    def wrapped() -> torch.nn.Module:
        model = programs.make_model()
        model[0] = checkpoint_wrapper(model[0])
        return torch.compile(model, backend="eager")  # type: ignore[return-value]

    source, target = (wrapped(), plain()) if wrapped_first else (plain(), wrapped())
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    through_a_checkpoint(registry(model=source), registry(model=target))
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_word_of_the_users_own_is_no_wrapper() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    model = Odd()
    assert sorted(fqn.parameter_names({"m": model}).values()) == ["m.module.bias", "m.module.weight"]


def test_tied_weights_buffers_and_extra_state_come_back() -> None:
    class Rich(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight
            self.norm = torch.nn.BatchNorm1d(3)
            self.calls = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"calls": self.calls, "scale": torch.full((2,), float(self.calls))}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]
            assert torch.equal(state["scale"], torch.full((2,), float(self.calls)))

    source, target = Rich(), Rich()
    source.calls = 5
    source.norm(torch.randn(9, 3))
    one = registry(model=source, optimizer=torch.optim.Adam(source.parameters()))
    two = registry(model=target, optimizer=torch.optim.Adam(target.parameters()))
    source.head(source.embed(torch.arange(3))).sum().backward()
    one.optimizers["optimizer"].step()
    through_a_checkpoint(one, two)
    assert target.calls == 5
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.norm.running_mean, source.norm.running_mean)  # type: ignore[arg-type]
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert len(two.optimizers["optimizer"].state) == 1


class _Average:
    """An average of weights that is no module."""

    def __init__(self, *values: float) -> None:
        self.shadow = {"w": torch.tensor(values)}
        self.updates = (len(values), 1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


def test_any_stateful_object_comes_back_with_its_tensors() -> None:
    target = _Average(0.0)
    through_a_checkpoint(registry(ema=_Average(1.0, 2.0)), registry(ema=target))
    assert target.shadow["w"].tolist() == [1.0, 2.0]
    assert target.updates == (2, 1)


def test_another_model_is_an_error_that_says_how_it_differs() -> None:
    def linear(*sizes: int, **options: Any) -> Registry:
        return registry(model=torch.nn.Linear(*sizes, **options))

    with pytest.raises(MismatchedCheckpoint, match=r"2 tensors differ .* model\.bias: \(3,\) torch.float32 here, \(4,\) torch"):
        through_a_checkpoint(linear(2, 4), linear(2, 3))
    with pytest.raises(MismatchedCheckpoint, match=r"1 tensors of the model are not in the checkpoint, such as model\.bias"):
        through_a_checkpoint(linear(2, 4, bias=False), linear(2, 4))
    with pytest.raises(MismatchedCheckpoint, match=r"1 tensors in the checkpoint are not in the model, such as model\.bias"):
        through_a_checkpoint(linear(2, 4), linear(2, 4, bias=False))
    with pytest.raises(MismatchedCheckpoint, match=r"torch\.bfloat16 here"):
        through_a_checkpoint(linear(2, 4), linear(2, 4, dtype=torch.bfloat16))


def test_other_objects_are_an_error_both_ways() -> None:
    model = programs.make_model()
    with pytest.raises(
        MismatchedCheckpoint, match=r"other objects than this script has registered\. How we know: here: ema; there: none"
    ):
        through_a_checkpoint(registry(model=model), registry(model=programs.make_model(), ema=_Average(0.0)))
    with pytest.raises(MismatchedCheckpoint, match="here: net; there: model"):
        through_a_checkpoint(registry(model=model), registry(net=programs.make_model()))
