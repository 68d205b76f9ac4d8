"""What can be seen of a rank that says nothing: does it use a processor, does it read or write?

Less than a rank with a ``Run`` tells.  One that spins in an endless loop, or waits in a way that uses a processor, looks busy
from here; one that waits for something with good reason looks quiet.  Growth of its log is seen as writing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from slurm_resilience.runtime.processes import Process, snapshot

LOOK_EVERY_S = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")
_BUSY = 0.02  # of one processor, over one look
_READ_BYTES = 4096


class Outside:
    """Looks at process trees now and then; :meth:`quiet_s` says for how long nothing was seen."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._last: dict[int, tuple[float, int, int]] = {}
        self._active_at: dict[int, float] = {}

    def look(self, roots: Iterable[tuple[int, Process]], now: float) -> None:
        """Look at the ranks (number, process) and all that is below them, when it is time to."""
        if now - self._looked_at < LOOK_EVERY_S:
            return
        passed, self._looked_at = now - self._looked_at, now
        children: dict[int, list[int]] = {}
        for process in snapshot().values():
            children.setdefault(process.parent, []).append(process.pid)
        for rank, root in roots:
            used, read, wrote = 0.0, 0, 0
            todo = [root.pid]
            while todo:
                pid = todo.pop()
                todo += children.get(pid, ())
                cpu_s, its_read, its_wrote = _usage(pid)
                used, read, wrote = used + cpu_s, read + its_read, wrote + its_wrote
            before = self._last.get(rank)
            self._last[rank] = (used, read, wrote)
            if before is None or (
                used - before[0] >= _BUSY * passed or used < before[0] or read - before[1] >= _READ_BYTES or wrote != before[2]
            ):
                self._active_at[rank] = now

    def quiet_s(self, rank: int, now: float) -> float:
        """Seconds since anything was seen of the rank; 0 before the first look."""
        return now - self._active_at.get(rank, now)


def _usage(pid: int) -> tuple[float, int, int]:
    """Seconds of CPU, bytes read and bytes written by a process and the children that it has buried."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/io", "rb") as file:
            io = dict(line.split(b": ") for line in file.read().splitlines())
    except (OSError, ValueError):
        return 0.0, 0, 0
    cpu = sum(int(fields[at]) for at in (11, 12, 13, 14)) / _TICKS
    return cpu, int(io.get(b"rchar", 0)), int(io.get(b"wchar", 0))
