"""What is run, and where it stands in Slurm; fixed for the life of a supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunSpec:
    """``requeue_nodes``: fewest and most nodes to ask for in the next allocation, None for what the job asked for.

    ``settings``: the part of the configuration that ranks get.  ``restart``: Slurm's restart count.  ``gpus``: those of the
    job on each node, empty where it has none or nobody could tell; ``gpu_request``: what its environment says of them.
    ``lead_s``: how long before the time limit the ranks are to save and end; ``script_requeues``: there is no
    scontrol here, and the batch script has one.
    """

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, Any]
    checkpoints: str
    settings: dict[str, Any]
    job_id: str
    restart: int
    has_slurm: bool
    can_requeue: bool
    requeue_nodes: tuple[int, int] | None = None
    kill_wait_s: float = 30.0
    lead_s: float = 0.0
    script_requeues: bool = False
    gpus: Mapping[str, int] = field(default_factory=dict)
    gpu_request: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Takeover:
    """Whose place a supervisor takes: that of ``node``, from which nothing has been heard for ``silent_s``."""

    node: str
    silent_s: float
