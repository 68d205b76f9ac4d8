"""Making directories where others make them too."""

from __future__ import annotations

import os
import time
from pathlib import Path


def ensure(path: Path, *, patience_s: float = 2.0) -> None:
    """Make ``path`` and its missing parents, closed to writing by others; nothing happens where it exists.

    Parallel file systems may say "exists" and, for a moment, not know it as a directory yet (Automodel#3686).
    """
    for folder in [*reversed(path.parents), path]:
        if folder.is_dir():
            continue
        deadline = time.monotonic() + patience_s
        try:
            os.mkdir(folder, 0o755)
        except FileExistsError:
            while not folder.is_dir():
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
