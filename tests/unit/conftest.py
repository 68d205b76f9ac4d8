"""No test leaves a ``Run`` open: its signal handlers would be the next test's."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from slurm_resilience.training.signals import WATCHED

_BEFORE = {number: signal.getsignal(number) for number in WATCHED}


@pytest.fixture(autouse=True)
def every_run_is_closed() -> Iterator[None]:
    yield
    left = [number.name for number in WATCHED if signal.getsignal(number) != _BEFORE[number]]
    for number, handler in _BEFORE.items():
        signal.signal(number, handler)
    assert not left, f"a Run was not closed: the handlers of {', '.join(left)} are not those of before"
