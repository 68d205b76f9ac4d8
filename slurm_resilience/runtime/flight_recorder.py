"""Dumps of torch's flight recorder (what each collective was, and who has not come), taken along where they are switched on.

NCCL alone writes them, where TORCH_NCCL_TRACE_BUFFER_SIZE is set, to files named by TORCH_NCCL_DEBUG_INFO_TEMP_FILE: when its
own watchdog fires or when somebody writes into the pipe of TORCH_NCCL_DEBUG_INFO_PIPE_FILE.  Source: torch's
"Flight Recorder for Debugging Stuck Jobs".
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

DEFAULT_PREFIX = "/tmp/nccl_trace_rank_"  # noqa: S108 -- torch's own default
_MOST_BYTES = 16 << 20
_RECENT_S = 600.0  # one that the watchdog wrote when it saw the hang before us


class Recorder:
    """Asks ranks for their dumps, and copies them into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since = time.time()
        self.files: dict[int, Path] = {}

    def ask(self, rank: int, environment: Mapping[str, str]) -> None:
        """Ask a rank, if it records; returns at once whether or not it listens."""
        if not environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0").strip("0"):
            return
        self.files[rank] = Path(f"{environment.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', DEFAULT_PREFIX)}{rank}")
        pipe = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
        if pipe:
            with contextlib.suppress(OSError):
                fd = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.write(fd, b"1\n")
                finally:
                    os.close(fd)

    def collect(self) -> dict[str, str]:
        """Rank (as text) -> the copy of its dump, for those that have one of this attempt's life."""
        found: dict[str, str] = {}
        for rank, file in self.files.items():
            with contextlib.suppress(OSError):
                stat = file.stat()
                if stat.st_size <= _MOST_BYTES and stat.st_mtime >= self._since - _RECENT_S:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    copy = self._folder / f"flight-recorder-rank-{rank:05d}"
                    shutil.copyfile(file, copy)
                    found[str(rank)] = str(copy)
        return found
