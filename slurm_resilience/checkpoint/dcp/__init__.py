"""Sharded, verified checkpoints of state dicts, on top of torch.distributed.checkpoint's planners and file format.

The modules in here import torch; the package itself does so only when one of its names is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_resilience.checkpoint.dcp.background import BackgroundSaver
    from slurm_resilience.checkpoint.dcp.loading import LoadResult, load, load_latest
    from slurm_resilience.checkpoint.dcp.saving import save

__all__ = ["BackgroundSaver", "LoadResult", "load", "load_latest", "save"]

_HOME = {
    "BackgroundSaver": "background",
    "LoadResult": "loading",
    "load": "loading",
    "load_latest": "loading",
    "save": "saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
