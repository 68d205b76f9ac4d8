"""Can a run live in this folder?  Its kind of file system, locks, clock and room, tried from this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from slurm_resilience.checkpoint import filesystem
from slurm_resilience.doctor.findings import Finding

_ROOMY_BYTES = 10 << 30


def check(folder: Path) -> list[Finding]:
    """Findings about a folder that exists or could be made; the nearest parent that exists is looked at."""
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-"):
            pass
    except OSError as error:
        return [
            Finding(
                "folder-not-writable",
                "danger",
                f"No run can be kept in {folder}",
                f"{type(error).__name__}: {error}",
                "choose a folder on a file system that all nodes share and that you may write to",
            )
        ]
    kind = filesystem.of(there)
    return [*of_kind(kind, folder), *_lock(there, kind), *_clock(there), *_room(there)]


def of_kind(kind: filesystem.FileSystem, folder: Path) -> list[Finding]:
    """What the kind of file system alone says.  Pure."""
    if kind.kind in ("tmpfs", "ramfs"):
        return [
            Finding(
                "folder-in-memory",
                "danger",
                f"{folder} is in the memory of this machine: no node sees it, and it is gone with the machine",
                str(kind),
                "choose a folder on a file system that all nodes share",
            )
        ]
    if kind.reach == "node":
        return [
            Finding(
                "folder-local",
                "warning",
                f"{folder} may be this machine's alone, or its locks do not reach other nodes",
                str(kind),
                "a run on several nodes needs a shared folder; mount without nolock / local_lock / localflock",
            )
        ]
    if kind.reach == "none":
        return [
            Finding(
                "no-locks",
                "warning",
                "There are no locks here; two jobs that use one run folder at once are kept apart by the fence alone",
                str(kind),
                "mount Lustre with -o flock",
            )
        ]
    if kind.reach == "unknown":
        what = "Nobody knows how far locks reach here; the fence does not need them"
        return [Finding("locks-unknown", "note", what, str(kind), "")]
    return []


def _lock(folder: Path, kind: filesystem.FileSystem) -> list[Finding]:
    if kind.reach == "none" or filesystem.excludes(folder) is not False:
        return []
    return [
        Finding(
            "lock-does-not-exclude",
            "warning",
            "A lock that one process holds, another one gets too",
            f"tried in {folder}: {kind}",
            "nothing is lost by it, the fence keeps attempts apart; ask for a mount with working locks",
        )
    ]


def _clock(folder: Path) -> list[Finding]:
    """The server of a network file system stamps files with its own clock."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        skew = time.time() - os.stat(file.name).st_mtime
    if abs(skew) < 3.0:
        return []
    return [
        Finding(
            "folder-clock",
            "warning",
            "The file server's clock is not ours",
            f"a file written now is stamped {abs(skew):.0f} s {'earlier' if skew > 0 else 'later'}",
            "nothing of ours compares them; ask for time synchronisation",
        )
    ]


def _room(folder: Path) -> list[Finding]:
    free = shutil.disk_usage(folder).free
    if free >= _ROOMY_BYTES:
        return []
    return [
        Finding(
            "little-room",
            "warning",
            "There is little room for checkpoints",
            f"{free / 1e9:.1f} GB are free in {folder}; a checkpoint of a model takes about 12 bytes a parameter with Adam",
            "choose a folder with more room, or keep fewer (checkpoint.keep_last)",
        )
    ]
