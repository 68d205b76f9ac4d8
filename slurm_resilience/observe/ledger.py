"""Where did the time go?  Each second of a run is in exactly one account."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """Seconds by what they were spent on; ``wall_s`` is measured apart and must be their sum.

    ``productive`` work that was kept · ``saving`` training stood still for a checkpoint · ``lost`` work that was done again ·
    ``restart`` from failure to first step, the queue apart · ``queued`` · ``reduced`` the share that missing nodes would have
    done while the job trained on without them.
    """

    wall_s: float
    productive_s: float = 0.0
    saving_s: float = 0.0
    lost_s: float = 0.0
    restart_s: float = 0.0
    queued_s: float = 0.0
    reduced_s: float = 0.0
    failures: int = 0
    requeues: int = 0

    @property
    def unproductive_s(self) -> float:
        """U: everything that held the nodes and was not kept."""
        return self.saving_s + self.lost_s + self.restart_s + self.reduced_s

    @property
    def unaccounted_s(self) -> float:
        """W - (R + U + Q): zero, up to rounding."""
        return self.wall_s - self.productive_s - self.unproductive_s - self.queued_s

    @property
    def ettr(self) -> float:
        """R / W; 0 for a run without any time."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, seconds rounded to milliseconds."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"ettr": self.ettr, **{name: round(value, 3) for name, value in values.items()}}
