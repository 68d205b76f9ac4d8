"""When did things fail?  The values that accounts yield and replays take."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resilience.errors import Cause


@dataclass(frozen=True)
class Failure:
    """One failure, ``at_s`` seconds after the start of the trace."""

    at_s: float
    cause: str = Cause.NODE_LOST.value
    node: str = ""


@dataclass(frozen=True)
class Trace:
    """Failures in order, over ``length_s`` seconds."""

    failures: tuple[Failure, ...]
    length_s: float
