"""What did ranks print, and what did a node's agent say?  The log files of a run: found, their ends read, followed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_ATTEMPT = re.compile(r"attempt-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.log")
_BLOCK = 1 << 16
_FOLLOW_S = 0.2
# A line that never ends is shown in pieces.
_LONGEST = 1 << 16


def attempts(run_dir: Path) -> list[int]:
    """The numbers of the attempts that have logs, in order."""
    with contextlib.suppress(OSError):
        found = (_ATTEMPT.fullmatch(name) for name in os.listdir(run_dir / "logs"))
        return sorted(int(match[1]) for match in found if match)
    return []


def ranks(run_dir: Path, attempt: int) -> dict[int, Path]:
    """Rank → its log in this attempt."""
    folder = run_dir / "logs" / f"attempt-{attempt:04d}"
    with contextlib.suppress(OSError):
        found = ((_RANK.fullmatch(name), folder / name) for name in os.listdir(folder))
        return dict(sorted((int(match[1]), path) for match, path in found if match))
    return {}


def of_node(run_dir: Path, node: str) -> dict[str, Path]:
    """What runs on a node → its log: the start of its agent, the agent, its launcher."""
    kinds = {kind: run_dir / "logs" / f"{kind}-{node}.log" for kind in ("start", "agent", "launcher", "takeover")}
    return {kind: path for kind, path in kinds.items() if path.exists()}


def tail(path: Path, count: int | None) -> tuple[list[str], int]:
    """The last ``count`` lines, or all of them for None, and where they end; a large file is read from its end only.

    Raises OSError when it cannot be read.
    """
    with open(path, "rb") as file:
        if count is None:
            data = file.read()
            return _lines(data), len(data)
        size = end = file.seek(0, os.SEEK_END)
        data = b""
        while end and data.count(b"\n") <= count and len(data) < count * _LONGEST:
            start = max(0, end - _BLOCK)
            file.seek(start)
            data = file.read(end - start) + data
            end = start
    return _lines(data)[-count:] if count else [], size


def _lines(data: bytes) -> list[str]:
    return [_text(line) for line in data.removesuffix(b"\n").split(b"\n")] if data else []


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


class Follower:
    """Gives what is written into files from now on, whole lines as far as there are any.

    ``files`` is asked each time which files those are, by label: others may come, and a file need not exist yet.  ``at`` is
    how many bytes of each are known already.
    """

    def __init__(self, files: Callable[[], dict[str, Path]], at: Mapping[Path, int]) -> None:
        self._files = files
        self._at = dict(at)
        self._rest: dict[Path, bytes] = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """Label and line for all that is new."""
        for label, path in self._files().items():
            try:
                with open(path, "rb") as file:
                    file.seek(self._at.get(path, 0))
                    data = file.read(1 << 22)
            except OSError:
                continue
            self._at[path] = self._at.get(path, 0) + len(data)
            *lines, rest = (self._rest.get(path, b"") + data).split(b"\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            self._rest[path] = rest
            yield from ((label, _text(line)) for line in lines)

    def leftovers(self) -> Iterator[tuple[str, str]]:
        """Last lines without an end, once nothing more will come."""
        for label, path in self._files().items():
            if self._rest.get(path):
                yield label, _text(self._rest.pop(path))


def follow(follower: Follower, over: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """All lines until the run is ``over``, and what was written until then."""
    while True:
        ended = over()
        yield from follower.read()
        if ended:
            yield from follower.leftovers()
            return
        time.sleep(_FOLLOW_S)
