"""How much memory may still be taken here, before the kernel ends somebody for it?  Asked before a save is copied.

The node's own figure, or what the tightest control group around this process leaves: Slurm confines a job's steps by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_V1_UNLIMITED = 1 << 60


def available_bytes(root: Path = Path("/")) -> int | None:
    """What may still be taken, page cache that can be dropped included; None where the kernel does not say."""
    free = _node(root / "proc/meminfo")
    if free is None:
        return None
    return max(0, min([free, *_groups(root)]))


def _node(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _groups(root: Path) -> Iterator[int]:
    """What each control group from ours to the top leaves.  Source: proc(5) and the kernel's cgroup-v1, cgroup-v2 documents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
        else:
            continue
        folder = top / inside.lstrip("/")
        while True:
            left = _left(folder, *names)
            if left is not None:
                yield left
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _left(folder: Path, limit_file: str, used_file: str, *droppable: str) -> int | None:
    """None where there is no limit, or none that can be read."""
    try:
        limit = (folder / limit_file).read_text().strip()
        if not limit.isdigit() or int(limit) >= _V1_UNLIMITED:
            return None
        used = int((folder / used_file).read_text())
        words = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        cache = sum(int(word[1]) for word in words if len(word) == 2 and word[0] in droppable)
    except (OSError, ValueError):
        return None
    return int(limit) - used + cache
