"""The loss curve of a run: RUN_DIR/metrics.jsonl, one line a step, written by rank 0.

``{"step": completed steps, "attempt": …, "world": …, "t": wall seconds, "loss": …}``.  After a relaunch some steps appear
again, with a higher attempt; :func:`history` keeps the last word on each step.  Values that are not finite are written as the
strings "nan", "inf", "-inf", which ``float()`` reads.

Lines without a step are notes: ``{"note": "rolled_back", "to": S}`` takes back what earlier lines say of steps past S,
``{"note": "trouble", …}`` is what the guard of the first steps went back for, ``{"note": "began_from", "run": …}`` whose
checkpoint a run took over.
"""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass, field
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

    def remark(self, about: str, /, **fields: Any) -> None:
        """Append a line that is about no step, durably.  Raises as :meth:`write`."""
        self.write({"note": about, **fields})
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def history(run_dir: str | os.PathLike[str], up_to_step: int | None = None) -> dict[int, dict[str, Any]]:
    """The newest line of each step, in the order of steps; lines that are torn or not ours are passed over."""
    return {step: line for step, line in Log.read(run_dir).newest.items() if up_to_step is None or step <= up_to_step}


@dataclass
class Log:
    """All that a run's file says.

    ``newest``: the last word on each step, without those that were taken back.  ``taken``: the last word on each step that was
    ever taken, also where the run has gone back since, for comparing with what is taken again; not those of an incident.
    ``trouble``: the notes of guards that went back and that the run has not got beyond since.
    """

    newest: dict[int, dict[str, Any]] = field(default_factory=dict)
    taken: dict[int, dict[str, Any]] = field(default_factory=dict)
    trouble: list[dict[str, Any]] = field(default_factory=list)
    began_from: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, run_dir: str | os.PathLike[str], *, got_over_after: int = 0, tail_bytes: int | None = None) -> Log:
        """From the file, or its last ``tail_bytes``.  Trouble is over once the run came ``got_over_after`` steps beyond it."""
        log = cls()
        try:
            file = open(Path(run_dir) / FILE_NAME, "rb")
        except FileNotFoundError:
            return log
        with file:
            if tail_bytes is not None and file.seek(0, os.SEEK_END) > tail_bytes:
                file.seek(-tail_bytes, os.SEEK_END)
                file.readline()
            else:
                file.seek(0)
            for raw in file:
                try:
                    line = json.loads(raw)
                    if "note" in line:
                        log._note(line)
                    else:
                        log._step(line, int(line["step"]), int(line["attempt"]), got_over_after)
                except (ValueError, KeyError, TypeError):
                    continue
        log.newest = dict(sorted(log.newest.items()))
        return log

    def _step(self, line: dict[str, Any], step: int, attempt: int, got_over_after: int) -> None:
        for known in (self.newest, self.taken):
            if step not in known or attempt >= known[step]["attempt"]:
                known[step] = line
        if self.trouble and all(step > int(one["step"]) + got_over_after for one in self.trouble):
            self.trouble.clear()

    def _note(self, line: dict[str, Any]) -> None:
        if line["note"] == "began_from":
            self.began_from.add(str(line["run"]))
            return
        forget = [self.newest] if line["note"] == "rolled_back" else [self.newest, self.taken]
        for known in forget:
            for step in [step for step in known if step > int(line["to"])]:
                del known[step]
        if line["note"] == "trouble":
            self.trouble.append(line)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
