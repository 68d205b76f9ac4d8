"""When is the next checkpoint due?  After so many minutes, or after as many as the run's own figures recommend.

Only rank 0 keeps the time; it tells the others through the agreement after each step.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slurm_resilience.plan.cadence import choose

CHANGED = 0.1
OF_THE_LAST = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Past:
    """What the run has seen before this attempt: failures that cost work, and the seconds in which they came."""

    nodes: int = 1
    observed_s: float = 0.0
    failures: int = 0


class Pace:
    """The seconds between two timed saves.  ``every_min`` None: there are no timed ones.

    ``tell`` is given each interval that ``auto`` chooses, with its reason.
    """

    def __init__(
        self,
        every_min: float | Literal["auto"] | None,
        *,
        bounds_min: tuple[float, float] = (0.5, 60.0),
        past: Past | None = None,
        tell: Callable[[float, str], None] = lambda interval_s, reason: None,
    ) -> None:
        self._auto = every_min == "auto"
        self._bounds_s = (bounds_min[0] * 60, bounds_min[1] * 60)
        self._past = past or Past()
        self._costs: deque[tuple[float, float]] = deque(maxlen=OF_THE_LAST)
        self._tell = tell
        self._began = self._last = time.monotonic()
        self.interval_s = math.inf
        if isinstance(every_min, (int, float)):
            self.interval_s = every_min * 60
        elif self._auto:
            self._choose(self._bounds_s[0], "what a save costs is not known yet: the shortest allowed, to learn it")

    def due(self) -> bool:
        """Whether the time since the last save is over."""
        return time.monotonic() - self._last >= self.interval_s

    def saved(self) -> None:
        """A save was begun, or was given up: the next one is due an interval from now."""
        self._last = time.monotonic()

    def measured(self, stall_s: float, write_s: float) -> None:
        """What the last save cost: seconds in which training stood, and seconds until it was durable.

        The median of the last few counts, and a change under a tenth is none: the optimum is flat.
        """
        if not self._auto:
            return
        self._costs.append((max(stall_s, 1e-3), write_s))
        choice = choose(
            stall_s=statistics.median(stall for stall, _ in self._costs),
            write_s=statistics.median(write for _, write in self._costs),
            nodes=self._past.nodes,
            observed_s=self._past.observed_s + time.monotonic() - self._began,
            failures=self._past.failures,
            at_least_s=self._bounds_s[0],
            at_most_s=self._bounds_s[1],
        )
        if abs(choice.interval_s - self.interval_s) > CHANGED * self.interval_s:
            self._choose(choice.interval_s, choice.reason)

    def _choose(self, interval_s: float, reason: str) -> None:
        self.interval_s = interval_s
        log.info("a checkpoint every %.0f s: %s", interval_s, reason)
        self._tell(interval_s, reason)
