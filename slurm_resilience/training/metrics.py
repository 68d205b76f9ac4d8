"""The loss curve of a run: RUN_DIR/metrics.jsonl, one line a step, written by rank 0.

``{"step": completed steps, "attempt": …, "world": …, "t": wall seconds, "loss": …}``.  After a relaunch some steps appear
again, with a higher attempt; :func:`history` keeps the last word on each step.  Values that are not finite are written as the
strings "nan", "inf", "-inf", which ``float()`` reads.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends lines; a torn last one of before stays alone on its line."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, line: dict[str, Any]) -> None:
        """Append one line.  Raises OSError when the disk refuses it, or a part of it; the next line is whole again."""
        plain = {name: _plain(value) for name, value in line.items()}
        raw = ("\n" * self._torn + json.dumps(plain, allow_nan=False) + "\n").encode()
        written = os.write(self._fd, raw)
        self._torn = written != len(raw) and (written > 0 or self._torn)
        if written != len(raw):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.path))

    def close(self) -> None:
        os.close(self._fd)


def history(run_dir: str | os.PathLike[str], up_to_step: int | None = None) -> dict[int, dict[str, Any]]:
    """The newest line of each step, in the order of steps; lines that are torn or not ours are passed over."""
    newest: dict[int, dict[str, Any]] = {}
    try:
        file = open(Path(run_dir) / FILE_NAME, "rb")
    except FileNotFoundError:
        return {}
    with file:
        for raw in file:
            try:
                line = json.loads(raw)
                step, attempt = int(line["step"]), int(line["attempt"])
            except (ValueError, KeyError, TypeError):
                continue
            if up_to_step is not None and step > up_to_step:
                continue
            if step not in newest or attempt >= newest[step]["attempt"]:
                newest[step] = line
    return dict(sorted(newest.items()))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
