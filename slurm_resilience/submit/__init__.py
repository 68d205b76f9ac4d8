"""From a function or a command to a job in the queue, and back to its result.

Importing this imports nothing else; the names are loaded when they are first used (submitit costs a tenth of a second).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["JobFailed", "ResilientExecutor", "ResilientJob", "map_resilient", "submit_resilient"]

if TYPE_CHECKING:
    from slurm_resilience.submit.api import map_resilient, submit_resilient
    from slurm_resilience.submit.executor import ResilientExecutor
    from slurm_resilience.submit.job import JobFailed, ResilientJob

_HOMES = {
    "JobFailed": "slurm_resilience.submit.job",
    "ResilientExecutor": "slurm_resilience.submit.executor",
    "ResilientJob": "slurm_resilience.submit.job",
    "map_resilient": "slurm_resilience.submit.api",
    "submit_resilient": "slurm_resilience.submit.api",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
