"""Which attempt owns a checkpoint root: a number that only grows, held by names and not by a lock.

Each attempt that opens the root for writing creates ``fence/a<attempt>``; the owner is the highest name there.
Creating a name needs no exclusion, so the fence holds on file systems whose locks do not exclude.  Raising it also
moves the older attempts' ``.writing-…`` directories away: a leftover that had already passed its own check finds
that the directory which it wants to publish is not there any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import fsync_dir
from slurm_resilience.checkpoint import folders, names
from slurm_resilience.errors import CheckpointError, Fenced

_TOKEN = re.compile(r"a(\d{5,})")


def token_name(attempt: int) -> str:
    return f"a{attempt:05d}"


class Fence:
    """The token of one root, as one attempt sees it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.path = Path(root) / names.FENCE

    def current(self) -> int:
        """The newest attempt that has opened the root, -1 before the first.  Reads a directory of one or two names."""
        try:
            listed = os.listdir(self.path)
        except FileNotFoundError:
            return -1
        except NotADirectoryError:
            raise CheckpointError(
                f"Nobody can say which attempt owns {self.path.parent}",
                evidence=f"{self.path} is no directory",
                remedy="move it away; then only start attempts with a number above that of every checkpoint there",
            ) from None
        return max((int(match[1]) for match in map(_TOKEN.fullmatch, listed) if match), default=-1)

    def owner(self) -> dict[str, Any]:
        """What the newest attempt wrote about itself; empty when there is none, or when it is unreadable."""
        attempt = self.current()
        try:
            value = json.loads((self.path / token_name(attempt)).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def check(self, attempt: int) -> None:
        """Raise :class:`Fenced` when a newer attempt than ``attempt`` owns the root."""
        newest = self.current()
        if newest > attempt:
            owner = self.owner()
            raise Fenced(
                f"Attempt {attempt} may not write to {self.path.parent}: attempt {newest} owns it now",
                evidence=f"{self.path / token_name(newest)} exists"
                + (f" (job {owner.get('job_id') or '?'}, node {owner.get('node') or '?'})" if owner else ""),
                remedy="nothing, if this process is a leftover of an older attempt; otherwise give the run a checkpoint "
                f"directory of its own, or an attempt number above {newest} (slurm-resilience checkpoints hand-over does that)",
            )

    def raise_to(self, attempt: int, about: dict[str, Any]) -> list[Path]:
        """Make ``attempt`` the owner; returns where the older attempts' unfinished saves went.

        Raises :class:`Fenced` when a newer attempt was here first.  Safe to repeat.
        """
        self.check(attempt)
        folders.ensure(self.path)
        with contextlib.suppress(IsADirectoryError):  # its name is what counts
            fd = os.open(self.path / token_name(attempt), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.write(fd, json.dumps(about).encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_dir(self.path)
        moved = self._evict(attempt)
        self.check(attempt)
        self._forget(attempt)
        return moved

    def _evict(self, attempt: int) -> list[Path]:
        root = self.path.parent
        moved = []
        for name in os.listdir(root):
            older = names.parse_writing(name)
            if older is None or older >= attempt:
                continue
            gone = root / names.GONE
            folders.ensure(gone)
            target = gone / f"{name}-{os.urandom(4).hex()}"
            try:
                os.rename(root / name, target)
            except FileNotFoundError:
                continue
            moved.append(target)
        return moved

    def _forget(self, attempt: int) -> None:
        """Keep the directory small: names far below the owner say nothing any more."""
        for name in os.listdir(self.path):
            match = _TOKEN.fullmatch(name)
            if match and int(match[1]) < attempt - 1:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    (self.path / name).unlink()
