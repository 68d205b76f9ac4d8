"""What will the ranks of this node read next?  Has it read into memory while the old ones are still being stopped.

Only a hint to the kernel, given in a child of the agent: a file system that hangs holds nobody up.  Each node asks for the
shards that its own ranks wrote, not for the whole checkpoint, or thousands of nodes would read it all at once; after a change
of the world others are needed, and this has read too much.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from slurm_resilience.checkpoint import names

# What else is in memory there is worth more than a guess.
_SHARE_OF_FREE = 0.5


def newest(root: Path) -> Path | None:
    """The committed checkpoint that was saved last, going by names alone; None where there is none.  Raises OSError."""
    found = [(parsed.attempt, parsed.step, name) for name in os.listdir(root) if (parsed := names.parse(name)) is not None]
    for _, _, name in sorted(found, reverse=True):
        if (root / name / names.MANIFEST).exists():
            return root / name
    return None


def prefetch(root: Path, ranks: Collection[int]) -> dict[str, object]:
    """Ask the kernel for the newest checkpoint's metadata and these ranks' shards: what was asked for, {} for nothing.

    Never more bytes than half of the memory that is free.  Raises OSError where the root cannot be read.
    """
    checkpoint = newest(root)
    if checkpoint is None:
        return {}
    room = int(_free_bytes() * _SHARE_OF_FREE)
    files = total = 0
    for name in (names.MANIFEST, names.METADATA, *(names.shard_file(rank) for rank in sorted(ranks))):
        try:
            fd = os.open(checkpoint / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # this rank wrote nothing
        try:
            size = os.fstat(fd).st_size
            if total + size > room:
                break
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
        files, total = files + 1, total + size
    return {"checkpoint": checkpoint.name, "files": files, "bytes": total}


def _free_bytes() -> int:
    """Memory that can be had without pushing anything out.  Source: proc(5), MemAvailable."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
