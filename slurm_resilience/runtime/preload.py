"""What should the next launcher import?  What the last attempt's ranks imported, in their order, kept in the run folder.

``fully_shard`` alone pulls in torch._dynamo, which costs each rank 3–4 s that a warm launcher pays once, ahead of time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json, write_json_atomic

FILE_NAME = "preload.json"
VERSION = 1
_MOST_NAMES = 20_000
_QUIET_S = 1.0


def read_learned(run_dir: Path) -> list[str]:
    """Names from the run folder; none when there is no such list, or none that we can read."""
    try:
        raw: Any = read_json(run_dir / FILE_NAME)
    except (OSError, ValueError):
        return []
    if not isinstance(raw, dict) or raw.get("v") != VERSION or not isinstance(raw.get("modules"), list):
        return []
    return [name for name in raw["modules"] if isinstance(name, str)][:_MOST_NAMES]


def write_learned(run_dir: Path, names: list[str]) -> None:
    """Replace the list, which is only an aid: not forced to disk.  Raises OSError."""
    write_json_atomic(run_dir / FILE_NAME, {"v": VERSION, "modules": names[:_MOST_NAMES]}, durable=False)


class ImportWatch:
    """New names in the file where a rank writes down its imports, told once it has been quiet for a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def fresh(self) -> list[str]:
        """Names that came since the last call, [] while the rank is still importing."""
        try:
            stat = os.stat(self._path)
            if stat.st_size == self._read or time.time() - stat.st_mtime < _QUIET_S:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._read)
                raw = file.read()
        except OSError:
            return []
        self._read += len(raw)
        return [*dict.fromkeys(raw.decode(errors="replace").split("\n")[:-1])]
