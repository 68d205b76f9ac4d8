"""Which supervisor of a run is the newest, and does it live?  Both are read from files that every node sees.

An epoch is claimed by making its file: the file system lets exactly one process do that, so no two supervisors ever have the
same one, however close together they start.  None is ever removed, or somebody slow could have it once more.  The newest claim
fences all older supervisors off.  The pulse is rewritten every second by the acting supervisor; an agent that hears nothing
looks at it before it believes that there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

PULSE_EVERY_S = 1.0
_FOLDER = "epochs"
_PULSE = "pulse"


def newest(run_dir: Path) -> int:
    """The newest epoch that anybody has claimed; 0 before the first.  Raises OSError when the folder cannot be read."""
    try:
        names = os.listdir(run_dir / _FOLDER)
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def claim(run_dir: Path, epoch: int, who: str) -> bool:
    """Whether ``epoch`` is ours now; False when somebody else has it.  Raises OSError when the folder cannot be written."""
    folder = run_dir / _FOLDER
    folder.mkdir(exist_ok=True)
    try:
        fd = os.open(folder / str(epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with contextlib.suppress(OSError):  # who it was is for people; on a full disk the empty file claims as well
        os.write(fd, (json.dumps({"who": who, "pid": os.getpid()}) + "\n").encode())
    os.close(fd)
    return True


def claim_next(run_dir: Path, who: str, *, after: int = 0) -> int:
    """Claim the epoch that follows all others and ``after``.  Raises OSError when the folder cannot be written."""
    while True:
        epoch = max(newest(run_dir), after) + 1
        if claim(run_dir, epoch, who):
            return epoch


def beat(run_dir: Path, epoch: int, count: int) -> None:
    """Say that the supervisor of ``epoch`` lives.  Raises OSError."""
    fd = os.open(run_dir / _PULSE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, f"{epoch:012d} {count:012d}\n".encode(), 0)  # always as long: needs no new room on a full disk
    finally:
        os.close(fd)


def pulse(run_dir: Path) -> str:
    """What the pulse says now; "" where there is none.  Opened anew each time: NFS shows what was written by then."""
    try:
        return (run_dir / _PULSE).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return ""
