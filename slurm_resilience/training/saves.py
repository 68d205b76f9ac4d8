"""What the loop needs of whoever takes its checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.training.pace import Pace


class Saves(Protocol):
    """Takes checkpoints.  ``begun_step``, ``saved_step``: of the newest that was begun, and that all know to be durable.

    All ranks must come to every call but :meth:`poll`.
    """

    pace: Pace
    begun_step: int | None
    saved_step: int | None

    def begin(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the state after ``step`` completed steps, and save it behind training where that is possible."""
        ...

    def save(self, step: int, metrics: dict[str, Any]) -> Entry | None:
        """The same, and durable when it returns; None when that failed."""
        ...

    def save_before(self, deadline: float | None, step: int, metrics: dict[str, Any]) -> bool:
        """Save what can be saved before ``deadline``; whether the state of ``step`` is durable."""
        ...

    def settle(self) -> Entry | None:
        """Wait for the save in flight: its entry, None when it failed or there is none."""
        ...

    def poll(self) -> None:
        """After each step; raises what must not wait.  Never waits itself."""
        ...

    def copy(self, step: int) -> None:
        """Take a copy into the node's own memory, if one is due after this step."""
        ...

    def drop_copies(self) -> None:
        """The shared checkpoint is as new as any copy."""
        ...
