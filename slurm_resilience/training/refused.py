"""Who is to blame when a checkpoint cannot be used: the object that was to take it, or the checkpoint."""

from __future__ import annotations

from slurm_resilience.errors import CheckpointError


class RestoreFailed(CheckpointError):
    """An object did not take the state that was kept for it, although the bytes are as they were saved."""


class CheckFailed(CheckpointError):
    """The restored run is not the run that was saved."""
