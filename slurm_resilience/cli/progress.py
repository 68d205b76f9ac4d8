"""How far is work that takes long, and when will it be done?  On stderr: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from slurm_resilience.observe.duration import short

_LINE_EVERY_S = 10.0
_LOOK_EVERY_S = 0.5
_GB, _MB = 1e9, 1e6


@contextlib.contextmanager
def of_bytes(label: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many bytes were done since its last call, from any thread."""
    if quiet:
        yield lambda done: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.advance(task, done)
    else:
        yield Lines(label, total, _bytes).add


@contextlib.contextmanager
def of_count(label: str, total: int, count: Callable[[], int]) -> Iterator[None]:
    """Asks ``count`` now and then, from a thread of its own, how many of ``total`` are done; an error is "unknown"."""
    lines = Lines(label, total, str, every_s=0.0 if sys.stderr.isatty() else _LINE_EVERY_S, redraw=sys.stderr.isatty())
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_EVERY_S):
            with contextlib.suppress(Exception):
                lines.set(count())

    watcher = threading.Thread(target=look, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        lines.clear()


class Lines:
    """Says how far it is at most every ``every_s`` seconds; ``shown`` makes a text of an amount."""

    def __init__(
        self, label: str, total: int, shown: Callable[[int], str], *, every_s: float = _LINE_EVERY_S, redraw: bool = False
    ) -> None:
        self._label, self._total, self._shown = label, total, shown
        self._every_s, self._redraw = every_s, redraw
        self._began = self._said_at = time.monotonic()
        self._done = 0
        self._lock = threading.Lock()

    def add(self, done: int) -> None:
        """So much more is done."""
        with self._lock:
            self._done += done
            self._say()

    def set(self, done: int) -> None:
        """So much is done in all."""
        with self._lock:
            self._done = done
            self._say()

    def clear(self) -> None:
        """Nothing more will be said; what was drawn on a terminal goes."""
        if self._redraw:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said_at < self._every_s:
            return
        self._said_at = now
        text = sentence(self._label, self._done, self._total, now - self._began, self._shown)
        print(f"\r\x1b[K{text}" if self._redraw else text, end="" if self._redraw else "\n", file=sys.stderr, flush=True)


def sentence(label: str, done: int, total: int, elapsed_s: float, shown: Callable[[int], str]) -> str:
    """``label: 3.1 GB of 12.0 GB after 13 s, about 38 s left``; no guess before anything is done."""
    left = f", about {short(elapsed_s / done * (total - done))} left" if 0 < done < total else ""
    return f"{label}: {shown(done)} of {shown(total)} after {short(elapsed_s)}{left}"


def _bytes(amount: int) -> str:
    return f"{amount / _GB:.1f} GB" if amount >= _GB else f"{amount / _MB:.1f} MB"
