"""A curve for the terminal and a chart for a page, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8a5a9e")


def sparkline(values: Sequence[float]) -> str:
    """One bar for each value, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    if high <= low:
        return _BARS[-1] * len(values)
    return "".join(_BARS[int((value - low) / (high - low) * (len(_BARS) - 1) + 0.5)] for value in values)


def svg(title: str, x_label: str, y_label: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """A line chart as an SVG document; x on a logarithmic scale, y from 0 to 1."""
    import math

    width, height, left, top, right, bottom = 720, 420, 64, 44, 150, 52
    xs = [math.log10(x) for _, points in series for x, _ in points]
    low, high = min(xs), max(*xs, min(xs) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (math.log10(x) - low) / (high - low) * (width - left - right)
        return round(across, 1), round(top + (1 - min(1.0, max(0.0, y))) * (height - top - bottom), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tenth in range(0, 11, 2):
        _, y = place(10**low, tenth / 10)
        parts.append(f'<path d="M{left} {y}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tenth / 10:.1f}</text>')
    for mark in _marks(10**low, 10**high):
        x, y = place(mark, 0)
        parts.append(f'<path d="M{x} {y}v5" stroke="#444"/><text x="{x}" y="{y + 20}" text-anchor="middle">{mark:g}</text>')
    for number, (name, points) in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - right + 12}" y="{top + 16 + 20 * number}" fill="{colour}">{escape(name)}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text transform="translate(18 {height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten inside the range; only the powers when it is wide."""
    import math

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    return [
        factor * 10.0**power for power in powers for factor in factors if low * 0.999 <= factor * 10.0**power <= high * 1.001
    ]
