"""Drawings for the page, as SVG that takes its colours from the page's style sheet and its width from the window.

Every figure has a title and a description for those who do not see it; nothing is said by colour alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from slurm_resilience.observe.duration import short
from slurm_resilience.observe.failures import MOVED_BY_HAND
from slurm_resilience.observe.incidents import PHASES, Incident, faults, numbered
from slurm_resilience.observe.report import thinning
from slurm_resilience.observe.report.story import Span as Attempt
from slurm_resilience.observe.report.story import Story

WIDTH = 960
_LEFT, _RIGHT = 96, 16
_MOST_LANES = 24
KINDS = ("training", "saving", "lost", "down", "queued")
KIND_NAMES = {
    "training": "training that was kept", "saving": "standing still for a checkpoint", "lost": "work that was done again",
    "down": "starting and restarting", "queued": "waiting for an allocation",
}  # fmt: skip


def timeline(story: Story) -> str:
    """What the run did when: one lane for the run, one for each node with the attempts that ran there, faults as flags."""
    length = max(story.end - story.start, 1e-6)
    names = sorted({name for attempt in story.attempts for name in attempt.nodes})
    shown = names[:_MOST_LANES]
    lanes_top, lane, gap = 64, 22, 6
    bottom = lanes_top + (lane + gap) * (1 + len(shown))
    height = bottom + 34

    def x(t: float) -> float:
        return _LEFT + (min(max(t, story.start), story.end) - story.start) / length * (WIDTH - _LEFT - _RIGHT)

    parts = [_label(_LEFT - 8, lanes_top + 15, "run", anchor="end")]
    wide = WIDTH - _LEFT - _RIGHT
    spans = [span for span in story.account.spans if span.end > span.start]
    fine = thinning.narrowest(len(spans), thinning.MOST_BARS, wide)
    for group in thinning.grouped(spans, lambda span: x(span.start), lambda span: x(span.end), fine):
        kind = thinning.main_kind(group)
        words = f"{'' if len(group) == 1 else 'mostly '}{KIND_NAMES[kind]}, {short(group[-1].end - group[0].start)}"
        parts.append(_bar(x(group[0].start), x(group[-1].end), lanes_top, lane, f"k-{kind}", words))
    fine = thinning.narrowest(len(story.attempts) * len(shown), thinning.MOST_BARS, wide, lanes=len(shown))
    for place, name in enumerate(shown, start=1):
        y = lanes_top + place * (lane + gap)
        parts.append(_label(_LEFT - 8, y + 15, name if len(name) <= 12 else f"{name[:11]}…", anchor="end"))
        here = [attempt for attempt in story.attempts if name in attempt.nodes]
        for some in thinning.grouped(here, lambda one: x(one.start), lambda one: x(one.end), fine):
            left, right = x(some[0].start), x(some[-1].end)
            parts.append(_bar(left, right, y, lane, f"attempt a{some[0].number % 2}", _attempts(some)))
            if right - left > 22 and len(some) == 1:
                parts.append(_label((left + right) / 2, y + 15, str(some[0].number), "on-bar", anchor="middle"))
    if len(names) > len(shown):
        parts.append(_label(_LEFT, bottom + 4, f"and {len(names) - len(shown)} more nodes", "quiet"))
    free = [0.0, 0.0]  # up to where each of the two rows of labels is taken
    fine = thinning.narrowest(len(story.incidents), thinning.MOST_FLAGS, wide)
    for among in thinning.grouped(numbered(story.incidents), lambda one: x(one[1].t), lambda one: x(one[1].t), fine):
        number, incident = among[0]
        at = x(incident.t)
        if len(among) > 1:
            words = f"{len(among)} incidents, from {_stamp_of(among[0])} to {_stamp_of(among[-1])}"
            parts.append(f'<path class="flag" d="M{at:.1f} 44V{bottom - gap}"><title>{escape(words)}</title></path>')
            continue
        brief = f"{number}" if number is not None else "moved" if incident.cause == MOVED_BY_HAND else "end"
        where = f" on {incident.node}" if incident.node else ""
        words = f"{brief}. {incident.cause}{where}" if number is not None else incident.cause
        parts.append(f'<path class="flag" d="M{at:.1f} 44V{bottom - gap}"><title>{escape(words)}</title></path>')
        for row, text in ((0, words), (1, words), (0, brief), (1, brief)):
            length_px = 7.6 * len(text)
            left = min(at, WIDTH - _RIGHT - length_px)
            if left >= free[row]:
                parts.append(_label(left, 38 - 18 * row, text, "flag-label"))
                free[row] = left + length_px + 8
                break
    for tick, text in time_ticks(length):
        at = x(story.start + tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {bottom}v6"/>')
        parts.append(_label(at, bottom + 22, text, "quiet", anchor="middle"))
    said = f"{len(story.attempts)} attempts and {len(faults(story.incidents))} incidents in {short(length)}."
    return _figure("What happened when", said, height, parts)


def _attempts(some: Sequence[Attempt]) -> str:
    if len(some) > 1:
        return f"attempts {some[0].number} to {some[-1].number}, {short(some[-1].end - some[0].start)}"
    one = some[0]
    ended = f", ended by {one.end_cause}" if one.end_cause else ""
    ranks = f"{one.world} rank{'s' if one.world != 1 else ''}"
    return f"attempt {one.number} on {ranks}, {short(one.end - one.start)}{ended}"


def _stamp_of(one: tuple[int | None, Incident]) -> str:
    number, incident = one
    return f"{number}" if number is not None else incident.cause


def curve(story: Story) -> str:
    """The loss over the steps; what an incident cost is drawn hollow, below the line that replaced it."""
    curves = [one for one in story.curves if one.steps]
    if not curves:
        return ""
    height, top, bottom = 320, 20, 44
    low, high = _range(loss for one in curves for loss in one.losses)
    first, last = min(one.steps[0] for one in curves), max(one.steps[-1] for one in curves)
    wide, tall = WIDTH - _LEFT - _RIGHT, height - top - bottom

    def place(step: int, loss: float) -> str:
        across = _LEFT + (step - first) / max(1, last - first) * wide
        return f"{across:.1f},{top + (high - min(max(loss, low), high)) / max(high - low, 1e-12) * tall:.1f}"

    parts = []
    for tick in ticks(low, high, most=5):
        y = float(place(first, tick).partition(",")[2])
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_label(_LEFT - 8, y + 4, f"{tick:.4g}", "quiet", anchor="end"))
    for tick in ticks(first, last):
        if tick == int(tick):
            at = float(place(int(tick), low).partition(",")[0])
            parts.append(_label(at, height - 22, f"{int(tick):,}", "quiet", anchor="middle"))
    parts.append(_label(_LEFT + wide / 2, height - 4, "step", "quiet", anchor="middle"))
    strokes: dict[str, list[tuple[str, str]]] = {"curve": [], "again": []}
    for one, points in zip(curves, thinning.thinned(curves), strict=True):
        kept = [place(step, loss) for step, loss in points if step <= one.kept_to]
        again = [place(step, loss) for step, loss in points if step > one.kept_to]
        words = escape(f"attempt {one.attempt}")
        if kept:
            strokes["curve"].append((words, " ".join(kept)))
        if again:
            strokes["again"].append((f"{words}, done again later", " ".join([*kept[-1:], *again])))
    for kind, lines in strokes.items():
        if len(curves) > thinning.MOST_CURVES:  # one stroke: a name for each would be most of the page
            parts.append(f'<path class="{kind}" d="{"".join(f"M{points}" for _, points in lines)}"/>')
        else:
            parts += [
                f'<polyline class="{kind}" points="{points}"><title>{words}</title></polyline>' for words, points in lines
            ]
    fine = thinning.narrowest(len(curves), thinning.MOST_FLAGS, wide)
    begins = [(float(place(one.steps[0], low).partition(",")[0]), one.attempt) for one in curves[1:]]
    for some in thinning.grouped(begins, lambda one: one[0], lambda one: one[0], fine):
        words = f"attempt {some[0][1]} goes on here" if len(some) == 1 else f"attempts {some[0][1]} to {some[-1][1]} go on here"
        parts.append(f'<path class="flag" d="M{some[0][0]:.1f} {top}v{tall}"><title>{words}</title></path>')
    final = next(loss for loss in reversed(curves[-1].losses))
    said = f"From {curves[0].losses[0]:.4g} to {final:.4g} over {last - first + 1:,} steps, by {len(curves)} attempts."
    return _figure("Loss", said, height, parts)


def shares(story: Story) -> str:
    """One bar: where the time went."""
    ledger = story.account.ledger
    values = dict(
        zip(KINDS, (ledger.productive_s, ledger.saving_s, ledger.lost_s, ledger.restart_s, ledger.queued_s), strict=True)
    )
    total = sum(values.values()) or 1.0
    parts, at = [], 0.0
    for kind, value in values.items():
        right = at + value / total * WIDTH
        if value > 0:
            parts.append(_bar(at, right, 0, 34, f"k-{kind}", f"{KIND_NAMES[kind]}: {short(value)}, {value / total:.1%}"))
            if right - at > 56:
                parts.append(_label((at + right) / 2, 22, f"{value / total:.0%}", "on-bar", anchor="middle"))
        at = right
    said = "; ".join(f"{KIND_NAMES[kind]} {value / total:.1%}" for kind, value in values.items())
    return _figure("Where the time went", said, 34, parts)


def phases(measured: dict[str, float], longest: float) -> str:
    """The phases of one incident, from the fault on, on the scale of the longest one."""
    known = _drawn(measured)
    colours = phase_colours(measured)
    parts = []
    for (_, begin), (name, end) in itertools.pairwise(known):
        left, right = begin / longest * WIDTH, end / longest * WIDTH
        parts.append(
            _bar(left, max(right, left + 1), 0, 20, f"phase {colours[name]}", f"{name.replace('_', ' ')}: {short(end - begin)}")
        )
    said = ", ".join(f"{name.replace('_', ' ')} after {short(at)}" for name, at in known[1:]) or "no phase was reached"
    return _figure("Phases", said, 20, parts, stretch=True)


def phase_colours(measured: dict[str, float]) -> dict[str, str]:
    """The style of each drawn phase, the same in the bar and in its legend."""
    return {name: f"p{number % 3}" for number, (name, _) in enumerate(_drawn(measured)[1:])}


def _drawn(measured: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, measured[name]) for name in PHASES if name in measured and name != "caught_up"]


def time_ticks(length_s: float, *, most: int = 8) -> list[tuple[float, str]]:
    """Moments that a clock knows (5 s, 30 s, 2 min, 6 h …) from 0 on, at most ``most`` after it, each with its text."""
    steps = [(size * n, unit, size) for unit, size, counts in _CLOCK for n in counts]
    rough = length_s / most
    step, unit, size = next((each for each in steps if each[0] >= rough), (_nice(rough / 86_400) * 86_400, "d", 86_400.0))
    return [(n * step, f"{n * step / size:g} {unit}" if n else "0") for n in range(math.floor(length_s / step + 1e-9) + 1)]


_CLOCK = (
    ("ms", 0.001, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
    ("s", 1.0, (1, 2, 5, 10, 15, 30)),
    ("min", 60.0, (1, 2, 5, 10, 15, 30)),
    ("h", 3600.0, (1, 2, 3, 6, 12)),
    ("d", 86_400.0, (1, 2, 5, 10, 20, 50)),
)


def _nice(rough: float) -> float:
    power = float(10 ** math.floor(math.log10(rough)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def ticks(low: float, high: float, *, most: int = 8) -> list[float]:
    """Round numbers between the two, at most ``most`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    step = _nice(rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Iterable[float]) -> tuple[float, float]:
    """From the lowest to the highest, but a few spikes do not flatten all the rest."""
    ordered: Sequence[float] = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[min(len(ordered) - 1, math.ceil(0.995 * len(ordered)) - 1)]
    if high - low > 4 * (usual - low) > 0:
        high = low + 2 * (usual - low)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _bar(left: float, right: float, y: float, height: float, kind: str, words: str) -> str:
    width = max(right - left, 0.5)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2">'
        f"<title>{escape(words)}</title></rect>"
    )


def _label(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(title: str, said: str, height: float, parts: Iterable[str], *, stretch: bool = False) -> str:
    shape = ' preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}"{shape} role="img" aria-label={quoteattr(f"{title}. {said}")}>'
        f"<title>{escape(title)}</title><desc>{escape(said)}</desc>{''.join(parts)}</svg>"
    )
