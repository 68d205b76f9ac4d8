"""What did the last steps give?  A bounded memory of loss and gradient norm that travels with the checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

WATCHED = ("loss", "grad_norm")
LENGTH = 64

Rows = dict[int, dict[str, float]]
"""Completed steps → what was reported for them, of the metrics that are watched."""


class Track:
    """The newest rows; plain JSON out, plain JSON in."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=LENGTH)

    def add(self, step: int, said: Mapping[str, Any]) -> None:
        """Remember a completed step, if it reported anything that is watched."""
        row = watched(said)
        if row:
            self._rows.append((step, row))

    def to_json(self) -> list[list[Any]]:
        return [[step, {name: _plain(value) for name, value in row.items()}] for step, row in self._rows]

    def load(self, rows: Iterable[Any]) -> None:
        """Begin with what a checkpoint kept."""
        self._rows.clear()
        self._rows.extend((int(step), {name: float(value) for name, value in row.items()}) for step, row in rows)

    @property
    def rows(self) -> Rows:
        return dict(self._rows)


def watched(said: Mapping[str, Any]) -> dict[str, float]:
    """The watched numbers among all that was reported."""
    found = {}
    for name in WATCHED:
        value = said.get(name)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                found[name] = float(value)
            except ValueError:
                continue
    return found


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
