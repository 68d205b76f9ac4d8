"""What the kernel of this node says about the ranks: its messages, and whom its memory killer took.

Read as far as this user may; what may not be read is left out, and nothing is concluded from that.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_MOST_RECORDS, _MOST_LINES, _LINE_CHARACTERS = 20_000, 20, 300
_WARNING = 4  # and what is more severe; source: printk's levels
_TELLS = re.compile(
    r"out of memory|oom-kill|oom_reaper|segfault|general protection|NVRM: Xid|I/O error|EXT4-fs error|XFS .*(?:error|shutdown)"
    r"|nfs: server .* not responding|blocked for more than|Machine check|mce:|Hardware Error|traps:|LustreError",
    re.IGNORECASE,
)
_KILLED = re.compile(r"^(?:Out of memory|Memory cgroup out of memory): Killed process (\d+) \((.*?)\)")
_CGROUPS = Path("/sys/fs/cgroup")


def messages(since: float, *, path: str = "/dev/kmsg") -> list[str]:
    """Lines that tell of a fault and came after ``since`` (CLOCK_MONOTONIC seconds); [] where that may not be read.

    Source: the kernel's Documentation/ABI/testing/dev-kmsg.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    lines: list[str] = []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                raw = os.read(fd, 8192)
            except BrokenPipeError:  # what was next has been overwritten
                continue
            except OSError:
                break
            if not raw:
                break
            head, _, text = raw.decode(errors="replace").partition(";")
            fields = head.split(",")
            if len(fields) < 3 or not fields[0].isdigit() or not fields[2].isdigit():
                continue
            at = int(fields[2]) / 1e6
            line = text.splitlines()[0] if text else ""
            if at >= since and int(fields[0]) % 8 <= _WARNING + 2 and _TELLS.search(line):
                lines.append(f"[{at:.3f}] {line[:_LINE_CHARACTERS]}")
    finally:
        os.close(fd)
    return lines[-_MOST_LINES:]


def killed_for_memory(name: str, pid: int | None, lines: list[str]) -> str:
    """The kernel's own line about the end of this process, "" without one.

    It is known by its number, which is the kernel's only outside of PID namespaces, or else by its name.
    """
    outermost = _is_outermost()
    for line in reversed(lines):
        match = _KILLED.search(line.partition("] ")[2])
        if match and (int(match[1]) == pid if outermost else match[2] == name):
            return line
    return ""


class MemoryKills:
    """How many processes the memory controller has killed in this process's own control groups since we began to count."""

    def __init__(self, *, cgroups: Path = _CGROUPS, own: str = "/proc/self/cgroup") -> None:
        self._files = list(_counters(cgroups, own))
        self._before = {file: _count(file) for file in self._files}

    def since(self) -> int:
        """The most that any group around us has counted; groups around us count for those within."""
        return max((_count(file) - self._before[file] for file in self._files), default=0)


def _is_outermost() -> bool:
    """Whether process numbers here are the kernel's own.  Source: PROC_PID_INIT_INO of the kernel."""
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    except OSError:
        return False


def _counters(cgroups: Path, own: str) -> list[Path]:
    """Files with a line ``oom_kill N``: memory.events (v2), memory.oom_control (v1).  Source: the kernel's cgroup manuals."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path(own).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                candidates = [
                    cgroups / path.strip("/") / "memory.events",
                    cgroups / "unified" / path.strip("/") / "memory.events",
                ]
            elif "memory" in controllers.split(","):
                candidates = [cgroups / "memory" / path.strip("/") / "memory.oom_control"]
            else:
                continue
            found += [file for file in candidates if file.is_file()][:1]
    return found


def _count(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
