"""Whose files are these?  What is unpickled must be ours (or root's), and nobody else may write it.

A digest in the same directory proves nothing against somebody who can write there; owner and mode do.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from slurm_resilience.checkpoint.errors import UntrustedCheckpoint


def check_stat(what: str | os.PathLike[str], info: os.stat_result) -> None:
    """Raise :class:`UntrustedCheckpoint` unless the file is ours or root's and closed to writing by others."""
    if info.st_uid not in (os.geteuid(), 0):
        raise UntrustedCheckpoint(
            f"{os.fspath(what)} belongs to somebody else, so it is not unpickled",
            evidence=f"its owner is user {info.st_uid}, we are user {os.geteuid()}",
            remedy="copy the checkpoint as yourself, after you have made sure that you trust where it comes from",
        )
    sticky_dir = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky_dir:
        raise UntrustedCheckpoint(
            f"{os.fspath(what)} can be written by others, so it is not unpickled",
            evidence=f"its mode is {stat.filemode(info.st_mode)}",
            remedy=f"chmod go-w {os.fspath(what)}",
        )


def check_directory(directory: Path) -> None:
    """The checkpoint's directory and its root are ours alone.  The files are checked when they are opened."""
    for path in (directory.parent, directory):
        check_stat(path, os.stat(path))
