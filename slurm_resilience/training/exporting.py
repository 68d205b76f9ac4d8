"""The weights of a checkpoint as one file for others, written by one process that has neither model nor GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from slurm_resilience.checkpoint import dcp
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.foreign import require_format, write_weights


@dataclass(frozen=True)
class Exported:
    """What was written: the model's label, its tensors, the file's bytes, and what of the model is no tensor."""

    model: str
    tensors: int
    bytes: int
    left_out: tuple[str, ...]


def export(store: CheckpointStore, entry: Entry, path: Path, *, model: str | None = None) -> Exported:
    """Write a model of ``entry`` to ``path`` (``.pt`` or ``.safetensors``); every byte is verified while it is read.

    Names are those of the model without wrappers, as its own ``state_dict()`` has them.  Takes as much memory as the model.
    Raises :class:`ConfigError` when ``model`` does not say which, and the errors of a load for a bad checkpoint.
    """
    require_format(path)  # before a long load
    manifest = store.manifest(entry)
    models = (manifest.extra.get("training") or {}).get("models") or {}
    label = model or (next(iter(models)) if len(models) == 1 else "")
    if label not in models:
        raise ConfigError(
            f"Which model of {entry.name}?" if models else f"{entry.name} holds no model that a Run has saved",
            evidence=f"it holds {', '.join(sorted(models))}" if models else "its manifest names none",
            remedy="name it: --model NAME" if models else "",
        )
    room = {
        name: torch.empty(about["shape"], dtype=getattr(torch, about["dtype"].removeprefix("torch.")))
        for name, about in manifest.tensors.items()
        if name.startswith(f"{label}.")
    }
    dcp.load(store, entry, room, strict=False)
    about = {"checkpoint": entry.name, "step": str(entry.step), "model": label, "written_by": "slurm-resilience"}
    size = write_weights(path, {name.removeprefix(f"{label}."): value for name, value in room.items()}, about)
    return Exported(label, len(room), size, tuple(name.removeprefix(f"{label}.") for name in models[label]))
