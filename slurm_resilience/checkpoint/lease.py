"""Who reads which checkpoint now, so that it is not pruned under their hands.

A lease is a small file in ``.reading/``.  It is void when a newer attempt owns the root, when its process is provably
gone (same node and another boot, or no such process), or when the time that it asked for is over; otherwise it holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_resilience._clock import Clock, boot_id
from slurm_resilience.checkpoint import folders, names

LEASE_S = 6 * 3600.0


@contextlib.contextmanager
def reading(root: Path, name: str, *, attempt: int | None, clock: Clock) -> Iterator[None]:
    """Hold a lease on one checkpoint.  Where none can be written (a read-only root), nobody can prune either."""
    path = root / names.LEASES / f"{name}.{secrets.token_hex(4)}"
    about = {
        "attempt": attempt,
        "node": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": os.getpid(),
        "until": clock.time() + LEASE_S,
    }
    try:
        folders.ensure(path.parent)
        path.write_text(json.dumps(about))
    except OSError:
        path = Path()
    try:
        yield
    finally:
        if path.name:
            path.unlink(missing_ok=True)


def being_read(root: Path, *, owner: int, clock: Clock) -> set[str]:
    """The names under a lease that holds; void leases are removed."""
    held = set()
    for path in _files(root / names.LEASES):
        try:
            about = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            about = {}
        if isinstance(about, dict) and _void(about, owner, clock.time()):
            path.unlink(missing_ok=True)
        else:
            held.add(path.name.rpartition(".")[0])
    return held


def _files(folder: Path) -> list[Path]:
    try:
        return [Path(found.path) for found in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _void(about: dict[str, Any], owner: int, now: float) -> bool:
    attempt = about.get("attempt")
    if isinstance(attempt, int) and attempt < owner:
        return True
    if isinstance(about.get("until"), (int, float)) and now > about["until"]:
        return True
    if about.get("node") != socket.gethostname() or not boot_id():
        return False
    return about.get("boot_id") != boot_id() or not _alive(about.get("pid"))


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
