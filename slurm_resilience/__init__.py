"""Keep PyTorch training on Slurm alive: detect, save, requeue, reshard, verify, go on.

Importing this package imports nothing else; the public names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["ResilienceConfig", "ResilientJob", "Run", "map_resilient", "submit_resilient"]

if TYPE_CHECKING:
    from slurm_resilience.config import ResilienceConfig
    from slurm_resilience.submit import ResilientJob, map_resilient, submit_resilient
    from slurm_resilience.training import Run

_HOMES = {
    "ResilienceConfig": "slurm_resilience.config",
    "ResilientJob": "slurm_resilience.submit",
    "Run": "slurm_resilience.training",
    "map_resilient": "slurm_resilience.submit",
    "submit_resilient": "slurm_resilience.submit",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'slurm_resilience' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
