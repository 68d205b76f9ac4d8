"""Is there room for the next save?  Said before it is begun, since a full file system also hurts everybody else."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_resilience.errors import CheckpointError

# tensors are written with a frame of about 1.5 KB each, and the manifest lists them
SLACK = 1.02
SLACK_BYTES = 1 << 20


class NoSpace(CheckpointError):
    """The save would not fit; nothing was written.  Quotas are not visible here and still end a save by an error."""


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write on the file system of ``path``."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def missing_bytes(path: Path, expected_bytes: int) -> int:
    """How many bytes are missing for a save of ``expected_bytes``; 0 when it fits."""
    return max(0, int(expected_bytes * SLACK) + SLACK_BYTES - free_bytes(path))


def refuse(path: Path, expected_bytes: int) -> NoSpace:
    """The error for a save that does not fit."""
    return NoSpace(
        f"There is no room for the next checkpoint in {path}",
        evidence=f"it needs about {expected_bytes / 1e6:.1f} MB, {free_bytes(path) / 1e6:.1f} MB are free",
        remedy="free space, keep fewer checkpoints, or remove some with 'slurm-resilience checkpoints prune'",
    )
