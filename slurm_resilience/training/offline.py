"""The whole verification of a checkpoint by the user's own script, without a run: nothing is trained, marked or written.

``slurm-resilience checkpoints verify --deep`` starts the script with VARIABLE in its environment; ``run.resume()`` then answers
into a file and ends the process.  Imports no torch, so that both sides can.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_resilience._atomic import write_atomic

if TYPE_CHECKING:
    from slurm_resilience.checkpoint.store import CheckpointStore
    from slurm_resilience.training.resume import Resumer

VARIABLE = "RESILIENCE_VERIFY"


@dataclass(frozen=True)
class Request:
    """Which checkpoints of which root, and where the answer goes."""

    root: str
    names: tuple[str, ...]
    answer: str

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def wanted(environment: Mapping[str, str] = os.environ) -> Request | None:
    """The request that this process was started with, if any."""
    raw = environment.get(VARIABLE)
    if not raw:
        return None
    value = json.loads(raw)
    return Request(value["root"], tuple(value["names"]), value["answer"])


def answer(request: Request, resumer: Resumer, store: CheckpointStore, *, leads: bool) -> None:
    """Verify one after the other; the first rank writes what came of it.  All ranks must come."""
    found: list[dict[str, Any]] = []
    entries = {entry.name: entry for entry in store.entries()}
    for name in request.names:
        checks, reason, seconds = resumer.verify(entries[name])
        found.append(
            {
                "name": name,
                "step": entries[name].step,
                "good": not reason,
                "reason": reason,
                "checks": [check.to_json() for check in checks],
                **seconds,
            }
        )
    if leads:
        write_atomic(Path(request.answer), json.dumps(found, default=str).encode())
