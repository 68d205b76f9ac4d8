"""What does a run begin with that has no checkpoint yet?"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from slurm_resilience.errors import ConfigError
from slurm_resilience.training import fqn
from slurm_resilience.training.foreign import read_weights
from slurm_resilience.training.identity import Identity
from slurm_resilience.training.state import Registry

_SHOWN = 6
_WRAPPER_WORDS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class _Start:
    path: Path
    model: str
    key: str | None
    strict: bool


class Starting(Identity):
    """The side of a ``Run`` that begins afresh."""

    _registry: Registry
    _stepper: Any
    _start: _Start | None = None

    def start_from(
        self, path: str | os.PathLike[str], *, model: str = "model", key: str | None = None, strict: bool = True
    ) -> None:
        """Begin with the weights of somebody else's file; once the run has a checkpoint of its own, that counts instead.

        ``path`` is a ``.pt`` or ``.safetensors`` file, or a folder as ``save_pretrained()`` writes it; every rank reads it.
        ``model`` is the registered model that takes them; ``key`` the part of the file that holds them, where it holds more.
        With ``strict`` a name or shape that does not match is an error; without, what matches is taken.  A parameter that is
        not a number, or too large for the model's kind of numbers, always is one.  Call it before :meth:`resume`, on all ranks
        alike; nothing is read when the run is resumed.  Sharded models take their own part.
        Raises ConfigError after :meth:`resume`: it would be ignored.
        """
        if self._stepper is not None:
            raise ConfigError(
                f"run.start_from({os.fspath(path)!r}) came after run.resume()",
                evidence="the run has begun already, so the file would not be read",
                remedy="call it before run.resume()",
            )
        self._start = _Start(Path(path).absolute(), model, key, strict)

    def _start_fresh(self) -> None:
        # What cannot be kept should be known before the first step, not at the first save.
        self._world.team.agree("looking at what is registered", lambda: self._registry.capture() and None)
        begun: dict[str, Any] = {}
        self._world.team.funnel("comparing what ranks begin with", lambda: self._start, _same_start)
        if (start := self._start) is not None:
            begun = self._world.team.agree(f"starting from {start.path}", lambda: self._take(start))
        self._link.send("started_fresh", **begun)

    def _take(self, start: _Start) -> dict[str, Any]:
        module = self._registry.models.get(start.model)
        if module is None:
            known = ", ".join(sorted(self._registry.models)) or "none"
            raise ConfigError(f"start_from() names the model {start.model!r}", evidence=f"registered models: {known}")
        fqn.settle(module)
        taken, missing, left = place_weights(start.model, module, read_weights(start.path, start.key), start.strict, start.path)
        return {"weights": str(start.path), "taken": taken, "missing": missing, "unused": left}


def _same_start(starts: list[_Start | None]) -> None:
    """Raises :class:`ConfigError` when ranks were told different things: they would wait for each other, or differ for good."""
    for rank, start in enumerate(starts):
        if start != starts[0]:
            raise ConfigError(
                "Ranks begin with different weights",
                evidence=f"rank 0: {_told(starts[0])}; rank {rank}: {_told(start)}",
                remedy="call run.start_from() with the same arguments on all ranks, each reads the file",
            )


def _told(start: _Start | None) -> str:
    if start is None:
        return "no start_from()"
    return f"{start.path}, model={start.model!r}, key={start.key!r}, strict={start.strict}"


def place_weights(
    label: str, module: torch.nn.Module, given: Mapping[str, torch.Tensor], strict: bool, path: Path
) -> tuple[int, int, int]:
    """Copy ``given`` into ``module``; how many were taken, how many of the model's are missing, how many are left over.

    Nothing is written when names or shapes do not match and ``strict`` is asked for.  Raises :class:`ConfigError` with them.
    """
    entries = {name.removeprefix(f"{label}."): value for name, (_, value) in fqn.model_entries(label, module).items()}
    own = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    if any(value.is_meta for value in own.values()):
        raise ConfigError(
            f"The model {label!r} has no memory yet",
            evidence="its tensors are on the meta device",
            remedy="call to_empty() first",
        )
    given = _plain_names(given, own)
    both = [name for name in own if name in given]
    no_values = [f"{name}: {what}" for name in both if (what := _no_plain_values(given[name]))]
    kinds = [
        f"{name}: {given[name].dtype} in the file, {own[name].dtype} in the model"
        for name in both
        if _kind(given[name]) != _kind(own[name])
    ]
    wrong = [
        f"{name}: {list(given[name].shape)} in the file, {list(own[name].shape)} in the model"
        for name in both
        if given[name].shape != own[name].shape
    ]
    tied = _tied(module)
    have = {tied.get(name, name) for name in both}
    missing = [name for name in own if name not in given and tied.get(name, name) not in have]
    left = [name for name in given if name not in own]
    hopeless = bool(wrong or kinds or no_values or not both)
    if hopeless or (strict and (missing or left)):
        found = {
            "other shapes": wrong,
            "other kinds of numbers": kinds,
            "no plain values": no_values,
            "not in the file": missing,
            "not in the model": left,
        }
        raise ConfigError(
            f"The weights in {path} are not those of the model {label!r}",
            evidence="; ".join(
                f"{what}: {', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}" for what, names in found.items() if names
            ),
            remedy="" if hopeless else "give strict=False to take what matches",
        )
    learned = {fqn.clean_name(module, name) for name, _ in module.named_parameters(remove_duplicate=False)}
    unusable = [f"{name}: {what}" for name in both if name in learned and (what := _unusable(given[name], own[name].dtype))]
    if unusable:
        raise ConfigError(
            f"The weights in {path} cannot be trained on",
            evidence=f"{', '.join(unusable[:_SHOWN])}{', …' * (len(unusable) > _SHOWN)}",
            remedy="take a file from before they went wrong, or a model in the file's own kind of numbers",
        )
    with torch.no_grad():
        for name in both:
            _copy(own[name], given[name])
    return len(both), len(missing), len(left)


def _copy(into: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(into, DTensor):
        # every rank has read the whole tensor: nothing needs to cross the network
        whole = value.to(into.device, into.dtype)
        into.copy_(distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None))
    else:
        into.copy_(value)


def _tied(module: torch.nn.Module) -> dict[str, str]:
    """The names of parameters that are another one's too → the first of its names; files often hold only one of them."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        clean = fqn.clean_name(module, name)
        out[clean] = first.setdefault(id(parameter), clean)
    return out


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    """What a copy must not change silently: quantized integers are no weights, complex numbers not real."""
    return tensor.is_floating_point(), tensor.is_complex()


def _no_plain_values(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "on the meta device"
    return "" if tensor.layout == torch.strided else f"{tensor.layout}"


def _unusable(value: torch.Tensor, dtype: torch.dtype) -> str:
    """What would spoil the first step.  Only of parameters: a buffer may well hold infinities, as masks do."""
    if not value.is_floating_point() or not value.numel():
        return ""
    if value.dtype.itemsize == 1:  # for these torch has neither comparisons nor sums
        value = value.float()
    low, high = (float(one) for one in torch.aminmax(value))  # NaN where any is
    if math.isnan(low):
        return "holds NaN"
    if math.isinf(low) or math.isinf(high):
        return "holds an infinity"
    most = max(-low, high)
    return f"holds {most:.3g}, too large for {dtype}" if most > torch.finfo(dtype).max else ""


def _plain_names(given: Mapping[str, torch.Tensor], own: Collection[str]) -> dict[str, torch.Tensor]:
    """Without the words that wrappers put into names; DDP's, where all names begin with it and the model's own do not."""
    split = {name: [word for word in name.split(".") if word not in _WRAPPER_WORDS] for name in given}
    ddp = all(words[0] == "module" and len(words) > 1 for words in split.values())
    if ddp and all(name.startswith("module.") for name in own):
        ddp = all(words[1] == "module" and len(words) > 2 for words in split.values())
    return {".".join(words[1:] if ddp else words): given[name] for name, words in split.items()}
