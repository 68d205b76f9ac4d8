"""A duration as people say it."""

from __future__ import annotations


def short(seconds: float) -> str:
    """Seconds in two digits and a unit: 40 ms, 0.4 s, 12 s, 3.0 min, 2.5 h, 4.1 days."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((60.0, "s", 1.0), (3600.0, "min", 60.0), (86_400.0, "h", 3600.0)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"
