"""What kind of file system is this, and does its lock exclude?  Said in the log, never relied upon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PARALLEL = {"lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "wekafs", "panfs", "orangefs"}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "zfs", "overlay", "f2fs", "ramfs", "bcachefs"}

# Takes the lock without waiting; 0: got it, 1: somebody holds it, 2: there is no such thing here.
_TRY = """
import errno, fcntl, os, sys
try:
    fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    sys.exit(1 if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else 2)
"""


@dataclass(frozen=True)
class FileSystem:
    """``kind`` and ``options`` as mounted; ``reach`` is how far a lock excludes by them: cluster, node, none, unknown."""

    kind: str
    mount_point: str
    options: frozenset[str]

    @property
    def reach(self) -> str:
        if self.kind in _LOCAL:
            return "node"
        if self.kind.startswith("nfs"):
            local = {option for option in self.options if option.startswith("local_lock=")} - {"local_lock=none"}
            if "nolock" in self.options or local:
                return "node"
            return "cluster" if self.kind == "nfs4" or "vers=4" in str(sorted(self.options)) else "unknown"
        if self.kind == "lustre":
            return "cluster" if "flock" in self.options else "node" if "localflock" in self.options else "none"
        return "cluster" if self.kind in _PARALLEL else "unknown"

    def __str__(self) -> str:
        says = {
            "cluster": "locks exclude between nodes",
            "node": "locks exclude within one node only",
            "none": "there are no locks",
            "unknown": "nobody knows how far locks exclude",
        }
        return f"{self.kind} on {self.mount_point}: {says[self.reach]}"


def of(path: str | os.PathLike[str], *, mounts: str | None = None) -> FileSystem:
    """The file system that holds ``path``.  Source: proc(5), /proc/self/mountinfo."""
    text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    target = os.path.realpath(path)
    best = FileSystem("unknown", "/", frozenset())
    for line in text.splitlines():
        front, _, back = line.partition(" - ")
        fields, rest = front.split(), back.split()
        if len(fields) < 6 or len(rest) < 1:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        within = point == "/" or target == point or target.startswith(point + "/")
        if within and len(point) >= len(best.mount_point):
            options = fields[5].split(",") + (rest[2].split(",") if len(rest) > 2 else [])
            best = FileSystem(rest[0], point, frozenset(options))
    return best


def excludes(folder: str | os.PathLike[str]) -> bool | None:
    """Whether a lock in ``folder`` keeps another process of this node out; None where there are no locks.

    Tried with a process of its own: some file systems keep locks per process.  Says nothing about other nodes.
    """
    import fcntl

    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lock-probe-") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        tried = subprocess.run([sys.executable, "-IS", "-c", _TRY, file.name], check=False, timeout=30)
    return {0: False, 1: True}.get(tried.returncode)
