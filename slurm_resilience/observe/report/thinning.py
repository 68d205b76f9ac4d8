"""What does a page show of more than it can hold?  Neighbours that are too narrow to be told apart are drawn as one.

A run of months has thousands of attempts; drawn one by one they make a page of many megabytes, of strokes finer than a pixel.
Below the limits nothing is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from slurm_resilience.observe.report.story import Curve
from slurm_resilience.observe.timeline import Span

MOST_BARS = 2000
MOST_FLAGS = 100
MOST_POINTS = 6000
MOST_CURVES = 300
MOST_INCIDENTS = 200
MOST_NODES = 300

_T = TypeVar("_T")


def grouped(
    items: Sequence[_T], left: Callable[[_T], float], right: Callable[[_T], float], narrowest: float
) -> Iterator[list[_T]]:
    """Neighbours, in order, put together until each group is that wide; gaps that are wider part them.  0: each alone."""
    group: list[_T] = []
    for item in items:
        if group and left(item) - right(group[-1]) > narrowest:
            yield group
            group = []
        group.append(item)
        if right(item) - left(group[0]) >= narrowest:
            yield group
            group = []
    if group:
        yield group


def narrowest(count: int, most: int, width: float, *, lanes: int = 1) -> float:
    """How wide a group has to be so that ``lanes`` of this width hold about ``most`` together; 0 where ``count`` is no more."""
    return 0.0 if count <= most else width * lanes / most


def main_kind(spans: Sequence[Span]) -> str:
    """What most of the time in these spans went to."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.end - span.start
    return max(seconds, key=lambda kind: seconds[kind])


def thinned(curves: Sequence[Curve]) -> list[list[tuple[int, float]]]:
    """The points of each curve, evenly fewer where there are too many in all; first and last stay."""
    every = max(1, -(-sum(len(one.steps) for one in curves) // MOST_POINTS))
    out = []
    for one in curves:
        points = list(zip(one.steps, one.losses, strict=True))
        kept = points[::every]
        out.append(kept if kept[-1:] == points[-1:] else [*kept, points[-1]])
    return out
