"""Small real checkpoints without torch: one file of bytes, committed through the store like any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.digest import digest, sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.manifest import Item
from slurm_resilience.checkpoint.store import CheckpointStore, Draft

FILE = names.shard_file(0)


def opened(root: Path, attempt: int = 1, **how: Any) -> CheckpointStore:
    store = CheckpointStore.open(root, attempt=attempt, job_id="42", node="n1", boot_id="b1", **how)
    store.fence()
    return store


def fill(draft: Draft, data: bytes) -> dict[str, Any]:
    """Write the files of a draft; returns what commit wants to know of them."""
    metadata = b"not read by anybody here"
    for name, raw in ((FILE, data), (names.METADATA, metadata)):
        fd = os.open(draft.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, raw)
        os.fsync(fd)
        os.close(fd)
    return {
        "world": 1,
        "files": {FILE: {"bytes": len(data)}, names.METADATA: {"bytes": len(metadata), "sha256": sha256(metadata)}},
        "items": [Item("weights", FILE, 0, len(data), 0, len(data), digest(data))],
    }


def commit(store: CheckpointStore, step: int, data: bytes = b"weights", **more: Any) -> Entry:
    draft = store.begin(step)
    return store.commit(draft, **fill(draft, data), **more)
