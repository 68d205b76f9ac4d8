"""A user's wish to take a node back, left in the run folder: RUN_DIR/forgive/NODE, until a supervisor has heard it."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = "forgive"


def ask(run_dir: Path, node: str) -> Path:
    """Leave the wish; its file.  Raises OSError when it cannot be written."""
    folder = run_dir / _FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / node
    path.touch()
    return path


def heard(run_dir: Path) -> list[str]:
    """The nodes that were asked for since the last look; each is told once.  Raises OSError when the folder cannot be read."""
    try:
        names = sorted(os.listdir(run_dir / _FOLDER))
    except FileNotFoundError:
        return []
    for name in names:
        (run_dir / _FOLDER / name).unlink(missing_ok=True)
    return names
