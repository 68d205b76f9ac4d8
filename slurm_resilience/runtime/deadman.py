"""Until when may what an agent has started run, if the agent itself does not get to say so any more?

One page of memory that agent and guardian share.  The agent writes it each turn of its loop; when the time in it passes, the
agent was stopped, or is stuck in the kernel, and the guardian kills the ranks in its place, before another node gets them.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable

_LIMIT = struct.Struct("<d")  # CLOCK_MONOTONIC seconds; one aligned store
_SPARED = struct.Struct("<32q")
_SPARED_AT = 64
_HEIR = struct.Struct("<q")
_HEIR_AT = 8


class DeadMan:
    """Made before the fork; the agent holds it, the guardian looks at it."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.release()

    def hold(self, until: float, spare: Iterable[int]) -> None:
        """Everything but ``spare`` (launchers; at most 32) may run until then, and no longer unless this is said again."""
        pids = list(spare)[:32]
        _SPARED.pack_into(self._page, _SPARED_AT, *pids, *([0] * (32 - len(pids))))
        _LIMIT.pack_into(self._page, 0, until)

    def release(self) -> None:
        """Nothing runs here that another node could get."""
        _LIMIT.pack_into(self._page, 0, math.inf)

    def bequeath(self, pid: int) -> None:
        """This process, with all that is below it, outlives the agent; 0: none does."""
        _HEIR.pack_into(self._page, _HEIR_AT, pid)

    def heirs(self) -> set[int]:
        """The process that outlives the agent, if there is one."""
        return set(_HEIR.unpack_from(self._page, _HEIR_AT)) - {0}

    def passed(self, now: float) -> bool:
        """Whether the time is over."""
        (limit,) = _LIMIT.unpack_from(self._page, 0)
        return bool(now > limit)

    def spared(self) -> set[int]:
        """The processes that may live on."""
        return set(_SPARED.unpack_from(self._page, _SPARED_AT)) - {0}
