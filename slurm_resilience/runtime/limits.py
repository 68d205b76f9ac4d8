"""How long may a rank be silent, going by what this run has shown so far?

A limit starts generous, and becomes a multiple of the longest silence that was seen in that kind of work, never below a floor.
What was seen is kept with the number of ranks that showed it, smoothed over attempts, in the run's event file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurm_resilience.config import LimitsConfig
from slurm_resilience.progress.sections import WARM_UP, Phase, word

START_STEP_S = 300.0
STEP = word(Phase.STEP)
# A limit that was learned from less than this is worse than the one to start with.
_ENOUGH_STEPS = 10
_ENOUGH = 3
_NEWEST_WEIGHS = 0.5
_NEWS = 1.25  # a limit that changed by this factor is worth an event


class Limits:
    """The limits of one attempt.  ``kept``: name -> longest silence, from earlier attempts on as many ranks."""

    def __init__(self, config: LimitsConfig, kept: Mapping[str, float]) -> None:
        self._config = config
        self._kept = dict(kept)
        self._seen: dict[str, tuple[int, float]] = {}
        self._told: dict[str, float] = {}

    def note(self, seen: Mapping[str, Any]) -> None:
        """What a node's ranks saw, by name: how often, and the longest silence."""
        for name, (times, longest_s) in seen.items():
            before = self._seen.get(name, (0, 0.0))
            self._seen[name] = (max(before[0], int(times)), max(before[1], float(longest_s)))

    def of(self, name: str, times: int) -> float:
        """The limit of this kind of work for a rank that has done it so many times in this attempt."""
        config = self._config
        if name == STEP and config.step_s is not None:
            return config.step_s
        start = START_STEP_S if name == STEP else config.init_s
        if name == STEP and times <= WARM_UP:
            start = max(start, config.init_s)
        longest = self._longest(name)
        if longest is None or not config.learn or (name == STEP and times <= WARM_UP):
            return start
        return max(config.floor_s if name == STEP else config.section_floor_s, config.factor * longest)

    def longest(self) -> dict[str, float]:
        """What is to be kept: the longest silence of each kind of work that was seen often enough."""
        return {name: found for name in sorted({*self._kept, *self._seen}) if (found := self._longest(name)) is not None}

    def news(self) -> dict[str, float] | None:
        """All limits, when one is new or differs clearly from what was told last; they count as told then."""
        now = {name: round(self.of(name, 1 << 30), 3) for name in {STEP, *self.longest()}}
        changed = [name for name, value in now.items() if not value / _NEWS < self._told.get(name, -math.inf) < value * _NEWS]
        if not changed:
            return None
        self._told = now
        return {"(start)": self._config.init_s, **dict(sorted(now.items()))}

    def why(self, name: str, limit_s: float) -> str:
        """Where a limit comes from, in a few words."""
        longest = self._longest(name)
        if longest is None or not self._config.learn or (name == STEP and self._config.step_s is not None):
            return f"limit {limit_s:g} s"
        return f"limit {limit_s:.3g} s; the longest before was {longest:.3g} s"

    def _longest(self, name: str) -> float | None:
        times, longest = self._seen.get(name, (0, 0.0))
        enough = times >= (_ENOUGH_STEPS if name == STEP else _ENOUGH)
        kept = self._kept.get(name)
        if not enough:
            return kept if kept is None else max(kept, longest)
        if kept is None:
            return longest
        return max(longest, _NEWEST_WEIGHS * longest + (1 - _NEWEST_WEIGHS) * kept)
