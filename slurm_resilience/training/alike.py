"""Have all ranks registered the same?

A checkpoint says once for all ranks which objects there are and what they are made of, and each rank takes from it what it has
itself.  Where ranks differ, saving works and no rank could ever load it: that has to be known before the first step.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from slurm_resilience.errors import ConfigError
from slurm_resilience.training import fqn
from slurm_resilience.training.state import KINDS, Registry
from slurm_resilience.training.world import World


class Inventory(NamedTuple):
    """One rank's objects.  ``made_of``: label of a model → (digest of its tensors' names, one of them)."""

    labels: tuple[str, ...]
    made_of: dict[str, tuple[str, str]]


def inventory(registry: Registry) -> Inventory:
    labels = tuple(sorted(f"{kind}: {label}" for kind in KINDS for label in getattr(registry, kind)))
    made_of = {}
    for label, model in registry.models.items():
        names = sorted(fqn.model_entries(label, model))
        made_of[label] = hashlib.sha256("\0".join(names).encode()).hexdigest(), names[0] if names else "nothing"
    return Inventory(labels, made_of)


def join(world: World, registry: Registry) -> None:
    """Join the other ranks and compare.  All ranks must come.  Raises :class:`ConfigError` on all of them."""
    world.join()
    world.team.funnel("comparing what the ranks have registered", lambda: inventory(registry), _compare)


def _compare(all_of_them: list[Inventory]) -> None:
    first = all_of_them[0]
    for rank, other in enumerate(all_of_them):
        if other.labels != first.labels:
            _refuse(f"rank 0 has {', '.join(first.labels)}; rank {rank} has {', '.join(other.labels)}")
        for label, (digest, name) in other.made_of.items():
            if digest != first.made_of[label][0]:
                _refuse(f"the tensors of {label!r} begin with {first.made_of[label][1]} on rank 0, with {name} on rank {rank}")


def _refuse(evidence: str) -> None:
    raise ConfigError(
        "The ranks have registered different objects, and no checkpoint of them could be loaded again",
        evidence=evidence,
        remedy="register the same objects, made of the same tensors, on every rank; stages of a pipeline, which differ, cannot "
        "be kept by a Run: let the script save them, and start it without a Run",
    )
