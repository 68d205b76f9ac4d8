"""To which run does a checkpoint root belong?  Two runs in one root would prune and fence each other's checkpoints away.

The first run that opens a root for writing leaves its id in ``fence/run.json``, made exclusively, so that of two that come at
once one is refused.  The number of the directory's inode stands beside it: in a copy of the root it is another one, and the
copy belongs to whoever opens it first, as does a root of an older release, which has no such file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import fsync_dir, write_atomic
from slurm_resilience.checkpoint import folders, names
from slurm_resilience.errors import ConfigError

CLAIM = "run.json"
_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


class RootOfAnotherRun(ConfigError):
    """The checkpoint root belongs to another run; nothing in it was touched."""


class Ownership:
    """The claim on one root."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.path = self.root / names.FENCE / CLAIM

    def owner(self) -> str:
        """The id of the run that the root belongs to, "" when it is nobody's: unclaimed, a copy, or a claim that is damaged."""
        try:
            about = json.loads(self.path.read_bytes())
            here = os.stat(self.root).st_ino
        except (OSError, ValueError, RecursionError):
            return ""
        if not isinstance(about, dict) or about.get("inode") != here:
            return ""
        run_id = about.get("run_id")
        return run_id if isinstance(run_id, str) else ""

    def require(self, run_id: str) -> None:
        """Raise :class:`RootOfAnotherRun` when it belongs to another one.  Whoever has no id is known by its number alone."""
        owner = self.owner()
        if owner and run_id and owner != run_id:
            raise RootOfAnotherRun(
                f"The checkpoints in {self.root} belong to another run, so run {run_id} does not touch them",
                evidence=f"{self.path} names run {owner}",
                remedy="give this run a checkpoint.dir of its own, or a copy of that directory to begin from; if the other run "
                f"is over and this one takes its place: slurm-resilience checkpoints hand-over {self.root} --to RUN_DIR",
            )

    def claim(self, run_id: str) -> None:
        """Make the root this run's, if it is nobody's.  Safe to repeat.  Raises :class:`RootOfAnotherRun`, or OSError."""
        self.require(run_id)
        if not run_id or self.owner() == run_id:
            return
        folders.ensure(self.path.parent)
        if not self._first(self._text(run_id)):
            self._let_it_be_written()
            self.require(run_id)  # somebody was faster
            self.give(run_id)  # nobody was: it is the claim on the original of this copy, or damaged
        fsync_dir(self.path.parent)
        self.require(run_id)

    def give(self, run_id: str) -> None:
        """Make the root that run's, whosever it was."""
        folders.ensure(self.path.parent)
        write_atomic(self.path, self._text(run_id))

    def _let_it_be_written(self) -> None:
        """Without hard links, a claim that was made a moment ago may be empty still; one that stays so is damaged."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and os.path.exists(self.path) and os.path.getsize(self.path) == 0:
            time.sleep(0.01)

    def _text(self, run_id: str) -> bytes:
        about: dict[str, Any] = {"v": 1, "run_id": run_id, "inode": os.stat(self.root).st_ino}
        return json.dumps(about).encode()

    def _first(self, text: bytes) -> bool:
        """Put the claim where there is none, whole: False where there is one."""
        tmp = self.path.with_name(f".{CLAIM}.{os.urandom(4).hex()}")
        try:
            with open(tmp, "xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(tmp, self.path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links; whoever reads it half written takes it for damaged
                try:
                    with open(self.path, "xb") as file:
                        file.write(text)
                except FileExistsError:
                    return False
            return True
        finally:
            tmp.unlink(missing_ok=True)
