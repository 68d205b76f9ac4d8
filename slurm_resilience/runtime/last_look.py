"""A last look at ranks that are about to be killed: their Python stacks, and what the kernel shows of them.

It never waits: the agent's loop asks it whether it is done, and it is after a second and a half at most.  Every rank that was
forked by a launcher, or started through it, has ``faulthandler`` on a signal of its own, which answers while C code holds
the interpreter's lock, too.  Where it does not answer, py-spy is asked, if it is installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from slurm_resilience.runtime import flight_recorder
from slurm_resilience.runtime.local_ranks import LocalRank
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.processes import send_signal
from slurm_resilience.runtime.rank_process import STACK_SIGNAL

_SETTLE_S, _LONGEST_S, _SPY_S = 0.3, 1.5, 1.0
_STACK_BYTES, _KERNEL_STACK_LINES = 16_000, 20
_TICKS = os.sysconf("SC_CLK_TCK")


class LastLook:
    """One look at the ranks of an attempt on this node; :meth:`tick` until it is done, then :meth:`result`."""

    def __init__(self, ranks: list[LocalRank], loop: Loop, *, recorded: Path) -> None:
        self._began = time.monotonic()
        self._loop = loop
        self._seen: dict[int, dict[str, Any]] = {}
        self._waits: dict[int, tuple[LocalRank, int]] = {}
        self._spying: set[int] = set()
        self._spied = shutil.which("py-spy") is None
        self._recorder = flight_recorder.Recorder(recorded)
        self._recorded: dict[str, str] = {}
        self._copying = False
        for rank in ranks:
            if rank.process is None or rank.gone:
                continue
            self._seen[rank.rank] = {"cpu_s": _cpu_s(rank.process.pid), **look_at(rank.process.pid)}
            self._recorder.ask(rank.rank, rank.environment)
            if _catches(rank.process.pid, STACK_SIGNAL):
                self._waits[rank.rank] = (rank, _size(rank.stacks))
                self._seen[rank.rank]["asked"] = True
                send_signal(rank.process, STACK_SIGNAL)
            else:
                self._waits[rank.rank] = (rank, -1)

    def tick(self, now: float) -> bool:
        """Look on; True when there is nothing more to wait for."""
        passed = now - self._began
        if passed < _SETTLE_S:
            return False
        silent = [rank for rank, start in self._waits.values() if start < 0 or not _complete(rank.stacks, start)]
        if silent and not self._spied:
            self._spied = True
            for rank in silent:
                self._spy(rank)
        if self._recorder.files and not self._copying:
            self._copying = True
            self._spying.add(-1)
            self._loop.aside(self._recorder.collect, self._copied, within_s=_SPY_S)
        return passed > _LONGEST_S or not (self._spying or any(not _stopped(rank) for rank in silent if self._asked(rank)))

    def _copied(self, files: Any) -> None:
        self._spying.discard(-1)
        self._recorded = files or {}

    def result(self) -> dict[str, Any]:
        """Rank (as text) -> what was seen, JSON values of bounded size."""
        passed = time.monotonic() - self._began
        for number, (rank, start) in self._waits.items():
            seen = self._seen[number]
            if rank.process is not None:
                used = max(0.0, _cpu_s(rank.process.pid) - seen.pop("cpu_s", 0.0))
                seen["cpu"] = round(used / passed, 2)
            if start >= 0 and "stacks" not in seen and (text := _read(rank.stacks, start)):
                seen["stacks"] = text[-_STACK_BYTES:]
            with contextlib.suppress(OSError, ValueError):
                sections = rank.page.read().frames
                seen["sections"] = [[each.name, round(each.own_s, 3), round(each.total_s, 3)] for each in sections]
        for name, file in self._recorded.items():
            self._seen[int(name)]["flight_recorder"] = file
        return {str(number): seen for number, seen in self._seen.items()}

    def _asked(self, rank: LocalRank) -> bool:
        return bool(self._seen[rank.rank].get("asked"))

    def _spy(self, rank: LocalRank) -> None:
        if rank.process is None:
            return
        pid, number = rank.process.pid, rank.rank
        self._spying.add(number)

        def took(text: Any) -> None:
            self._spying.discard(number)
            if text:
                self._seen[number]["stacks"] = str(text)[-_STACK_BYTES:]

        self._loop.aside(lambda: _py_spy(pid), took, within_s=_SPY_S)


def look_at(pid: int) -> dict[str, Any]:
    """State, tracer, swap and where it waits in the kernel, as far as this user may know."""
    seen: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if name == "State" and words:
                seen["state"] = words[0]
            elif name == "TracerPid" and words and words[0] != "0":
                seen["tracer"] = int(words[0])
            elif name in ("VmSwap", "VmRSS") and words:
                seen["swap_kb" if name == "VmSwap" else "rss_kb"] = int(words[0])
            elif name == "Threads" and words:
                seen["threads"] = int(words[0])
    with contextlib.suppress(OSError):
        seen["wchan"] = Path(f"/proc/{pid}/wchan").read_text().strip()
    with contextlib.suppress(OSError):  # root alone may read it
        seen["kernel_stack"] = Path(f"/proc/{pid}/stack").read_text().splitlines()[:_KERNEL_STACK_LINES]
    return seen


def _py_spy(pid: int) -> str:
    import subprocess

    done = subprocess.run(
        ["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=_SPY_S, check=False
    )
    return done.stdout


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal: without one it would die of it.  Source: proc(5), SigCgt."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _stopped(rank: LocalRank) -> bool:
    """It cannot answer: a stopped process handles no signal."""
    return rank.process is None or look_at(rank.process.pid).get("state") in ("T", "t", "D", None)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        return file.read(4 * _STACK_BYTES).decode(errors="replace")
    return ""


def _complete(path: Path, start: int) -> bool:
    """faulthandler writes all threads in one go, the main thread last; a file that has stopped growing is complete."""
    text = _read(path, start)
    return text.endswith("\n") and "(most recent call first)" in text
