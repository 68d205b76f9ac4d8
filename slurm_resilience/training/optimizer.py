"""An optimizer's state under its parameters' names, taken and put back without a hidden step.

torch's own helpers make sure that the state exists by calling ``optimizer.step()``: hooks fire, Adam's step becomes one,
and a checkpoint before the first step changes the training that follows; with gradients present they save nothing at
all.  Here what is there is kept, be it nothing, and what was kept is put back, through the optimizer's own
``state_dict`` and ``load_state_dict``.  Source: torch/distributed/checkpoint/state_dict.py, _init_optim_state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.checkpoint.errors import MismatchedCheckpoint
from slurm_resilience.errors import ConfigError
from slurm_resilience.training import plain
from slurm_resilience.training.layout import Layout


def capture(label: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: dict[str, torch.Tensor]) -> Any:
    """The groups and whatever is not a tensor, as JSON; tensors go into ``tensors`` as ``<label>.state.<parameter>.<word>``."""
    own = optimizer.state_dict()
    named = _named(label, optimizer, names)
    rest: dict[str, Any] = {}
    for index, state in own["state"].items():
        if index not in named:
            raise ConfigError(
                f"The optimizer {label!r} keeps state that belongs to no parameter", evidence=f"its key is {index!r}"
            )
        for word, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[_key(label, named[index], word)] = value.detach()
            else:
                rest.setdefault(named[index], {})[word] = plain.encode(value, _key(label, named[index], word), tensors)
    groups = []
    for group in own["param_groups"]:
        numbers = {name: _number(value, f"{label}/{name}") for name, value in group.items() if name != "params"}
        groups.append({"params": [named[index] for index in group["params"]], "numbers": numbers})
    return {"groups": groups, "rest": rest}


def template(
    label: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Any, layout: Layout
) -> dict[str, torch.Tensor]:
    """Room for every tensor that was saved for this optimizer, sharded as its parameters are now.

    Raises :class:`MismatchedCheckpoint` when the checkpoint is about other parameters.
    """
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
    _match_groups(label, _named_groups(label, optimizer, names), saved)
    room: dict[str, torch.Tensor] = {}
    present = optimizer.state
    prefix = f"{label}.state."
    for key in layout.under(prefix):
        name, _, word = key.removeprefix(prefix).rpartition(".")
        parameter = parameters.get(name)
        if parameter is None:
            raise MismatchedCheckpoint(
                f"The checkpoint's optimizer {label!r} has state for a parameter that this one does not have",
                evidence=f"{key} is in the checkpoint",
                remedy="resume with the model and the parameter groups that the run was started with",
            )
        room[key] = _room(parameter, word, layout.shape(key), layout.dtype(key), present.get(parameter, {}).get(word), key)
    return room


def restore(
    label: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Any,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Put back what :func:`capture` kept; afterwards the optimizer holds that and nothing of what it held before."""
    own = optimizer.state_dict()
    named = _named(label, optimizer, names)
    index_of = {name: index for index, name in named.items()}
    state: dict[int, dict[str, Any]] = {}
    prefix = f"{label}.state."
    loaded = dict(tensors)
    for key, value in loaded.items():
        if key.startswith(prefix):
            name, _, word = key.removeprefix(prefix).rpartition(".")
            if name in index_of and "/" not in word:
                state.setdefault(index_of[name], {})[word] = value
    for name, words in saved["rest"].items():
        for word, value in words.items():
            state.setdefault(index_of[name], {})[word] = plain.decode(value, loaded)
    order = _match_groups(label, _named_groups(label, optimizer, names), saved)
    groups = []
    for group, place in zip(own["param_groups"], order, strict=True):
        numbers = saved["groups"][place]["numbers"]
        groups.append({**group, **{name: _same_kind(value, group.get(name)) for name, value in numbers.items()}})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        _undo_casts(optimizer, state)


def _undo_casts(optimizer: torch.optim.Optimizer, given: Mapping[int, Mapping[str, Any]]) -> None:
    """Give back what torch has cast to the type of its parameter: moments in float32 beside parameters in bfloat16, or the
    reverse, are the optimizer's own choice.  Source: torch/optim/optimizer.py, _process_value_according_to_param_policy.
    """
    parameters = dict(enumerate(one for group in optimizer.param_groups for one in group["params"]))
    for index, words in given.items():
        now = optimizer.state[parameters[index]]
        for word, value in words.items():
            held = now.get(word)
            if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                now[word] = value


def held(label: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: dict[str, torch.Tensor]) -> None:
    """Put the tensors that an optimizer holds now into ``tensors``, under the names that :func:`capture` gives them."""
    if not takes_as_given(optimizer) or any(id(parameter) not in names for parameter in optimizer.state):
        capture(label, optimizer, names, tensors)
        return
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for word, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[_key(label, name, word)] = value.detach()
            elif isinstance(value, (list, tuple, dict)):
                plain.encode(value, _key(label, name, word), tensors)


def takes_as_given(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``load_state_dict`` keeps the tensors that it gets, as far as is known: torch's own do, without hooks."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooks


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group as a plain number."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _key(label: str, name: str, word: Any) -> str:
    if not isinstance(word, str) or "." in word:
        raise ConfigError(
            f"The optimizer {label!r} keeps state under a name that a checkpoint cannot hold",
            evidence=f"parameter {name}, state {word!r}: a word without dots is needed",
        )
    return f"{label}.state.{name}.{word}"


def _named(label: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """Index in the optimizer's ``state_dict`` → name.  It counts parameters over the groups (Optimizer.state_dict)."""
    named: dict[int, str] = {}
    seen: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            index = seen.setdefault(id(parameter), len(seen))
            if id(parameter) not in names:
                raise ConfigError(
                    f"The optimizer {label!r} trains a parameter that no registered model has",
                    evidence=f"a parameter of shape {tuple(parameter.shape)} is not among the named parameters of the models",
                    remedy="register every model whose parameters it trains; build the optimizer after fully_shard, not before",
                )
            named[index] = names[id(parameter)]
    return named


def _named_groups(label: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    _named(label, optimizer, names)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _match_groups(label: str, mine: list[list[str]], saved: Any) -> list[int]:
    """For each of our groups the place of the saved one with the same parameters; the order of groups may differ."""
    places = {frozenset(group["params"]): place for place, group in enumerate(saved["groups"])}
    found = [places.get(frozenset(group)) for group in mine]
    if None in found or len(mine) != len(saved["groups"]):
        theirs = {name for group in saved["groups"] for name in group["params"]}
        ours = {name for group in mine for name in group}
        sizes, old_sizes = [len(group) for group in mine], [len(group["params"]) for group in saved["groups"]]
        raise MismatchedCheckpoint(
            f"The parameter groups of the optimizer {label!r} are not those of the checkpoint",
            evidence=f"groups of {sizes} parameters here, of {old_sizes} there; "
            f"only here: {_some(ours - theirs)}; only there: {_some(theirs - ours)}",
            remedy="resume with the model and the parameter groups that the run was started with",
        )
    return [place for place in found if place is not None]


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def _room(
    parameter: torch.Tensor, word: str, shape: tuple[int, ...], dtype: torch.dtype, present: Any, key: str
) -> torch.Tensor:
    if shape == tuple(parameter.shape) and (shape or word != "step"):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if isinstance(present, torch.Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return torch.zeros_like(present)
    if isinstance(parameter, DTensor) and shape not in ((), (1,)):
        raise ConfigError(
            f"The optimizer state {key} cannot be resharded",
            evidence=f"its shape {shape} is not its sharded parameter's {tuple(parameter.shape)}, so its placement is unknown",
            remedy="train this optimizer without sharding, or take one whose state has the shape of its parameters",
        )
    return torch.zeros(shape, dtype=dtype, device="cpu" if word == "step" else parameter.device)


def _number(value: Any, key: str) -> Any:
    """A group's number; one kept in a tensor (``capturable``, compiled steps) by its value."""
    if isinstance(value, torch.Tensor):
        return {"$": "lr_tensor", "v": value.detach().cpu().tolist()}
    nowhere: dict[str, torch.Tensor] = {}
    return plain.encode(value, key, nowhere)


def _same_kind(value: Any, present: Any) -> Any:
    """The saved number, in a tensor where there is one now: compiled steps hold on to it."""
    number = value["v"] if isinstance(value, dict) and value.get("$") == "lr_tensor" else plain.decode(value, {})
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(number, dtype=present.dtype, device=present.device)
    return number
