"""What an agent tells a rank through its environment, besides what torch expects (RANK, WORLD_SIZE, …).

The names start with ``RESILIENCE_`` and not with ``SLURM_``, because submitting from inside a job scrubs the latter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slurm_resilience.progress.packed import pack, unpack


@dataclass(frozen=True)
class RankContract:
    """One rank's place in one attempt.

    ``settings`` is the part of the run's configuration that ranks need (JSON values only); ``plan`` is what the
    supervisor planned for this world: ``{"ranks": W, "mesh": {...}, "global_batch": …, "nodes": [...]}``.  In the environment
    that of many nodes is packed, since one variable holds 128 KiB (source: execve(2), MAX_ARG_STRLEN).
    """

    run_dir: str
    run_id: str
    attempt: int
    restart_count: int
    job_id: str
    node: str
    page: str
    facts: str
    checkpoints: str
    settings: dict[str, Any]
    plan: dict[str, Any]

    _NAMES: ClassVar[dict[str, str]] = {
        "run_dir": "RESILIENCE_RUN_DIR",
        "run_id": "RESILIENCE_RUN_ID",
        "attempt": "RESILIENCE_ATTEMPT",
        "restart_count": "RESILIENCE_RESTART_COUNT",
        "job_id": "RESILIENCE_JOB_ID",
        "node": "RESILIENCE_NODE",
        "page": "RESILIENCE_PAGE",
        "facts": "RESILIENCE_FACTS",
        "checkpoints": "RESILIENCE_CHECKPOINTS",
        "settings": "RESILIENCE_SETTINGS",
        "plan": "RESILIENCE_PLAN",
    }

    def to_environment(self) -> dict[str, str]:
        """The variables to put into the rank's environment."""
        out: dict[str, str] = {}
        for field, name in self._NAMES.items():
            value = pack(self.plan) if field == "plan" else getattr(self, field)
            out[name] = value if isinstance(value, str) else json.dumps(value)
        return out

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankContract | None:
        """The contract of this process, or None when no agent started it."""
        if "RESILIENCE_PAGE" not in environment:
            return None
        values: dict[str, Any] = {}
        for field, name in cls._NAMES.items():
            raw = environment[name]
            values[field] = json.loads(raw) if field in ("attempt", "restart_count", "settings", "plan") else raw
        return cls(**{**values, "plan": unpack(values["plan"])})
