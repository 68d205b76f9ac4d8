"""What time is it, and which boot of which machine is this?

Monotonic time decides, wall-clock time is only written down; monotonic values never leave the node.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the state machines see it, so that tests can make it jump."""

    def monotonic(self) -> float:
        """Seconds; never goes back; comparable between the processes of one boot."""
        ...

    def time(self) -> float:
        """Wall-clock seconds since the epoch (UTC); may jump."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


SYSTEM_CLOCK = SystemClock()


def boot_id() -> str:
    """The kernel's name for this boot, or "" where there is none.  Source: proc(5), random/boot_id."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
