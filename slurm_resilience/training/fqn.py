"""What is a parameter called, whatever wraps its module?

DDP, ``torch.compile`` and activation checkpointing put a word of theirs into the names of parameters.  A checkpoint must load
with and without them, so its names have none.
"""

from __future__ import annotations

from typing import Any

import torch

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def clean_name(model: torch.nn.Module, name: str) -> str:
    """``name`` (of a parameter or buffer as ``model`` knows it) without the words of wrappers."""
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
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{label}.{clean_name(model, name)}")
    return names


def model_entries(label: str, model: torch.nn.Module) -> dict[str, tuple[str, Any]]:
    """Name in a checkpoint → (name in the model's own ``state_dict``, value), built afresh from the model.

    A state dict that was kept from before FSDP2's first forward pass can point to storage that is no longer used.
    Source: pytorch/torchtitan#1136.
    """
    return {f"{label}.{clean_name(model, name)}": (name, value) for name, value in model.state_dict().items()}


def settle(model: torch.nn.Module) -> None:
    """Give FSDP2 modules their sharded parameters back.

    After a forward pass without a backward one (validation, the probe) the root module still shows its gathered parameters,
    which the optimizer does not know.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()
