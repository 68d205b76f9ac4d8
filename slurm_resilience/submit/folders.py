"""Where does a run live?  A folder of its own, that can be written and that the nodes will see too."""

from __future__ import annotations

import os
import re
import secrets
import time
import warnings
from pathlib import Path

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import ConfigError

# In the memory of this machine, or read-only by nature: no other node sees what is written there.
_NODE_LOCAL = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "proc", "sysfs", "squashfs", "iso9660"})
_USUALLY_LOCAL = ("/tmp", "/var/tmp", "/scratch/local", "/local")  # noqa: S108  (named to warn about them)


def check_folder(folder: str | os.PathLike[str], *, shared: bool = True) -> Path:
    """The folder that runs are made in, as an absolute path: writable and, when ``shared``, not in this machine's memory.

    It is not made yet: a mistake elsewhere should leave nothing behind.  Raises :class:`ConfigError` with what to do; warns
    about places that are local to a node on most clusters.
    """
    text = os.fspath(folder)
    bad = sorted({char for char in text if (ord(char) < 32 and char != "\t") or char in "\\\x7f"})
    if bad and (shared or "\0" in bad):
        raise ConfigError(
            f"The folder {text!r} cannot be used",
            evidence=f"it holds {', '.join(map(repr, bad))}, which neither a batch script nor Slurm's log names can carry",
            remedy="choose a folder without line breaks and backslashes; spaces, quotes and accents are fine",
        )
    path = Path(text)
    try:
        path = path.expanduser().absolute()
        # os.path.exists also answers for places that we may not look into; Path.exists raises there.
        there = next(place for place in (path, *path.parents) if os.path.exists(place))
        if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
            raise PermissionError(f"{there} may not be written, or is no folder")
        if there == path:
            probe = path / f".probe-{secrets.token_hex(4)}"
            probe.touch(exist_ok=False)
            probe.unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~somebody who is not here
        raise unwritable(path, error) from error
    if shared:
        kind = file_system(there)
        if kind in _NODE_LOCAL:
            raise ConfigError(
                f"The folder {path} is not shared with the nodes",
                evidence=f"it is on a {kind}, which is this machine's alone",
                remedy="give folder=… on a network file system, such as your home or project directory",
            )
        if any(path.is_relative_to(place) for place in _USUALLY_LOCAL):
            warnings.warn(
                f"{path} is local to each node on most clusters; a run needs a folder that all its nodes share", stacklevel=3
            )
    return path


def seen_by_nodes(folder: Path) -> bool:
    """What this folder holds here it holds there too, as far as one can tell: no machine has one of its own in its place."""
    own = any(folder.is_relative_to(place) for place in _USUALLY_LOCAL)
    return not own and file_system(folder) not in _NODE_LOCAL


def unwritable(path: Path, error: Exception) -> ConfigError:
    """The error for a folder that cannot be written."""
    return ConfigError(
        f"The folder {path} cannot be written",
        evidence=f"{type(error).__name__}: {error}",
        remedy="give folder=… on a file system that all nodes share and that you may write to",
    )


def file_system(path: Path) -> str:
    """The kind of file system that holds ``path``, in the kernel's words; "" when it cannot be told.

    Source: proc_pid_mountinfo(5).
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real = path.resolve()
    best, kind = -1, ""
    for line in lines:
        left, dash, right = line.partition(" - ")
        if not dash:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split(" ")[4]))
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split(" ")[0]
    return kind


def new_run_dir(folder: Path, name: str, *, clock: Clock = SYSTEM_CLOCK) -> Path:
    """Make and return a new folder in ``folder``, named after the run and the time (UTC); never one that was there before."""
    plain = re.sub(r"[^\w.+-]", "_", name) or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock.time()))
    for number in range(1, 1000):
        path = folder / (f"{plain}-{stamp}" if number == 1 else f"{plain}-{stamp}-{number}")
        try:
            path.mkdir(mode=0o755, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(folder, error) from error
        return path
    raise ConfigError(f"There are a thousand runs named {plain}-{stamp} in {folder} already")
