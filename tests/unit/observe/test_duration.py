"""Durations as people say them."""

from __future__ import annotations

import pytest

from slurm_resilience.observe.duration import short


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (0.01, "10 ms"), (0.4, "0.4 s"), (42, "42 s"), (90, "1.5 min"), (7200, "2.0 h"), (90_000 * 4, "4.2 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert short(seconds) == text
