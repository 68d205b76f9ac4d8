"""What can be wrong with a checkpoint, told apart by what the caller has to do about it."""

from __future__ import annotations

from slurm_resilience.errors import CheckpointError


class CorruptCheckpoint(CheckpointError):
    """The bytes are not those that were saved: quarantine the entry and take the next older one."""


class MismatchedCheckpoint(CheckpointError):
    """The checkpoint is whole and belongs to another model or layout: nothing is wrong with it, so never quarantine it."""


class UntrustedCheckpoint(CheckpointError):
    """Somebody else owns these files, or may write them: they are not unpickled."""


class IndexInconsistent(CheckpointError):
    """The index says something that the directories do not; the directories are right."""


class SaveInFlight(CheckpointError):
    """An earlier asynchronous save has not ended yet, and only one may be in flight."""
