"""When was this process not looking?  A rank's silence in that time is not held against it.

The agent compares its own clock first: where it did not run itself (stopped, swapped out, its machine suspended or starved),
neither, as far as it can tell, did the ranks.
"""

from __future__ import annotations

_LONGEST_TURN_S = 1.0  # the loop turns four times a second; what takes longer is an absence
_KEPT = 64


class Blind:
    """Told of every turn of the loop; times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._gaps: list[tuple[float, float]] = []

    def turn(self, now: float) -> None:
        """We look now."""
        if now - self._last > _LONGEST_TURN_S:
            self._gaps = [*self._gaps[-_KEPT + 1 :], (self._last, now)]
        self._last = now

    def within(self, seconds: float, now: float) -> float:
        """For how much of the last ``seconds`` we did not look."""
        since = now - seconds
        return sum(max(0.0, end - max(begin, since)) for begin, end in self._gaps)
