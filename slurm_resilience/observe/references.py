"""What coming back takes without us: the figures against which a report holds its own, and how they were measured.

The one source of them in the code; docs/explanation/comparison.md prints the same, and a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple


class Reference(NamedTuple):
    """Seconds from the fault to training, for a cause; ``who`` took them, under ``conditions``."""

    cause: str
    who: str
    seconds: float
    conditions: str


REFERENCES = (
    Reference(
        "node_lost", "Slurm's own requeue", 607.0, "node without power, Slurm 22.05.8 with SlurmdTimeout 300, median of 5"
    ),
    Reference("preemption", "plain scontrol requeue", 140.0, "to running only, idle cluster, Slurm 22.05.8, median of 20"),
    Reference(
        "rank_crash", "NVRx ft_launcher 0.4.1", 2.1, "script that imports FSDP2 and DCP, two cores, median of 6; torchrun 2.3 s"
    ),
)
