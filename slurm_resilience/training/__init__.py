"""What the user's script holds in its hands: ``Run``, its batches, its restored state.

Importing this package imports nothing else; torch comes with the first use of a name from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Batches", "Check", "Micro", "Run", "Verdict", "protect_worker"]

if TYPE_CHECKING:
    from slurm_resilience.training.data import Batches, Micro
    from slurm_resilience.training.run import Run
    from slurm_resilience.training.signals import protect_worker
    from slurm_resilience.training.verify import Check, Verdict

_HOMES = {
    "Batches": "slurm_resilience.training.data",
    "Check": "slurm_resilience.training.verify",
    "Micro": "slurm_resilience.training.data",
    "Run": "slurm_resilience.training.run",
    "Verdict": "slurm_resilience.training.verify",
    "protect_worker": "slurm_resilience.training.signals",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'slurm_resilience.training' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
