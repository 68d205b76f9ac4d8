"""Whose files are these?  What is unpickled must be ours (or root's), and nobody else may write it.

A digest in the same directory proves nothing against somebody who can write there; owner and mode do.  One group may be
trusted by name, for folders that a lab shares: then its members' files count as ours.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.checkpoint.errors import UntrustedCheckpoint
from slurm_resilience.errors import ConfigError


@dataclass(frozen=True)
class Trust:
    """Who besides us and root may own and write what is unpickled: nobody, or the members of one group."""

    group: int | None = None

    @classmethod
    def of(cls, group: str | int | None) -> Trust:
        """Trust in a group by name or number.  Raises :class:`ConfigError` when there is no such group."""
        if group is None or isinstance(group, int):
            return cls(group)
        try:
            return cls(grp.getgrnam(group).gr_gid)
        except KeyError:
            raise ConfigError(
                f"There is no group {group!r} to trust with checkpoints", evidence="getgrnam(3) does not know it on this node"
            ) from None

    def check(self, what: str | os.PathLike[str], info: os.stat_result) -> None:
        """Raise :class:`UntrustedCheckpoint` unless the file is ours, root's or the group's, and closed to all others."""
        theirs = self.group is not None and info.st_gid == self.group
        if info.st_uid not in (os.geteuid(), 0) and not (theirs and self._is_member(info.st_uid)):
            raise UntrustedCheckpoint(
                f"{os.fspath(what)} belongs to somebody else, so it is not unpickled",
                evidence=f"its owner is user {info.st_uid}, we are user {os.geteuid()}",
                remedy="copy the checkpoint as yourself, after you have made sure that you trust where it comes from, "
                "or name the group whose members you trust",
            )
        sticky_dir = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        refused = stat.S_IWOTH if theirs else stat.S_IWGRP | stat.S_IWOTH
        if info.st_mode & refused and not sticky_dir:
            raise UntrustedCheckpoint(
                f"{os.fspath(what)} can be written by others, so it is not unpickled",
                evidence=f"its mode is {stat.filemode(info.st_mode)}",
                remedy=f"chmod {'o' if theirs else 'go'}-w {os.fspath(what)}",
            )

    def check_directory(self, directory: Path) -> None:
        """The checkpoint's directory and its root are ours alone.  The files are checked when they are opened."""
        for path in (directory.parent, directory):
            self.check(path, os.stat(path))

    def _is_member(self, user: int) -> bool:
        try:
            about = pwd.getpwuid(user)
            assert self.group is not None
            return about.pw_gid == self.group or about.pw_name in grp.getgrgid(self.group).gr_mem
        except KeyError:
            return False
