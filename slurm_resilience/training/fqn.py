"""What is a parameter called, whatever wraps its module?

DDP, ``torch.compile`` and activation checkpointing put a word of theirs into the names of parameters.  A checkpoint must load
with and without them, so its names have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


_cleaned: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def clean_name(model: torch.nn.Module, name: str) -> str:
    """``name`` (of a parameter or buffer as ``model`` knows it) without the words of wrappers."""
    return _clean_names(model, [name])[name]


def _clean_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """All clean names of a model that are known, among them these."""
    known = _cleaned.get(model)
    if known is None:
        known = _cleaned[model] = {}
    known.update({name: _clean(model, name) for name in names if name not in known})
    return known


def _clean(model: torch.nn.Module, name: str) -> str:
    kept: list[str] = []
    at: Any = model
    for word in name.split("."):
        wrapped = isinstance(at, torch.nn.Module) and _WRAPPERS.get(type(at).__name__) == word
        if not wrapped:
            kept.append(word)
        at = getattr(at, word, None)
    return ".".join(kept)


def parameter_names(models: dict[str, torch.nn.Module]) -> dict[int, str]:
    """``id(parameter)`` → its name in a checkpoint, ``<model>.<parameter>``; a tied one has its first name."""
    names: dict[int, str] = {}
    for label, model in models.items():
        own = dict(model.named_parameters())
        clean = _clean_names(model, own)
        for name, parameter in own.items():
            names.setdefault(id(parameter), f"{label}.{clean[name]}")
    return names


def model_entries(label: str, model: torch.nn.Module) -> dict[str, tuple[str, Any]]:
    """Name in a checkpoint → (name in the model's own ``state_dict``, value), built afresh from the model.

    A state dict that was kept from before FSDP2's first forward pass can point to storage that is no longer used.
    Source: pytorch/torchtitan#1136.
    """
    state = model.state_dict()
    clean = _clean_names(model, state)
    return {f"{label}.{clean[name]}": (name, value) for name, value in state.items()}


def settle(model: torch.nn.Module) -> None:
    """Give FSDP2 modules their sharded parameters back.

    After a forward pass without a backward one (validation, the probe) the root module still shows its gathered parameters,
    which the optimizer does not know.
    """
    for module in model.modules():
        kind = type(module)  # a module's own getattr is slow where there is nothing
        if callable(getattr(kind, "reshard", None)) and hasattr(kind, "unshard"):
            module.reshard()  # type: ignore[operator]
