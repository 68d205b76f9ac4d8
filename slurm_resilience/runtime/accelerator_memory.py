"""Does a GPU still hold memory of processes that are dead?

The driver frees it when a process ends, which for many gigabytes, or a kernel that must first come to its end, is seconds after
the process is gone from ``/proc``.  A rank that is started in that time finds the memory taken and dies of it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Collection

from slurm_resilience.runtime.loop import Loop

TOOL = "nvidia-smi"
MOST_S = 30.0
_LOOK_EVERY_S = 0.25
_ANSWER_WITHIN_S = 10.0


def holders(tool: str) -> list[int]:
    """The processes for which a GPU holds memory.  Raises OSError, SubprocessError, or ValueError for an odd answer.

    Source: nvidia-smi --help-query-compute-apps.  In a container the numbers may be those of the host, and match nothing.
    """
    command = [tool, "--query-compute-apps=pid", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=True)
    return [int(word) for word in done.stdout.split()]


class MemoryWait:
    """Waits until no GPU of this node holds memory of the processes of a stopped attempt, and not longer than ``MOST_S``.

    Costs nothing where there is no ``nvidia-smi``.  When it does not answer there is no wait, which is said.
    """

    def __init__(self, loop: Loop, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._loop, self._say, self._changed = loop, say, changed
        self._tool = shutil.which(TOOL)
        self._dead: frozenset[int] = frozenset()
        self._began = 0.0
        self._asking = False
        self._look_at = float("inf")

    @property
    def over(self) -> bool:
        """Nothing is waited for."""
        return not self._dead

    def begin(self, dead: Collection[int]) -> None:
        """These processes have just ended."""
        if self._tool is None or not dead:
            return
        self._dead |= frozenset(dead)
        self._began = self._look_at = time.monotonic()
        self.tick(self._began)

    def next_look(self) -> float:
        """When to call :meth:`tick` again (monotonic)."""
        return self._look_at if self._dead and not self._asking else float("inf")

    def tick(self, now: float) -> None:
        """Ask again when it is time to."""
        if (tool := self._tool) is None or now < self.next_look():
            return
        self._asking = True
        self._loop.aside(lambda: _ask(tool), self._answered, within_s=_ANSWER_WITHIN_S + 1)

    def _answered(self, answer: list[int] | str | None) -> None:
        self._asking = False
        now = time.monotonic()
        self._look_at = now + _LOOK_EVERY_S
        waited = now - self._began
        if not isinstance(answer, list):
            self._end(f"whether GPU memory is free again is not known: {answer or f'{TOOL} did not answer'}")
        elif not (held := sorted(self._dead.intersection(answer))):
            self._end(f"GPU memory of the processes before is free after {waited:.1f} s" if waited > 1 else "")
        elif waited > MOST_S:
            names = ", ".join(map(str, held[:8]))
            self._end(f"after {waited:.0f} s a GPU still holds memory of {names}, which ended; ranks are started all the same")

    def _end(self, words: str) -> None:
        self._dead = frozenset()
        if words:
            self._say(words)
        self._changed()


def _ask(tool: str) -> list[int] | str:
    try:
        return holders(tool)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{TOOL}: {' '.join(str(error).split())[:200]}"
