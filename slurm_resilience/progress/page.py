"""The layout of the page that a rank and its agent share, and both ends of it.

One file of 4096 bytes in ``/dev/shm`` per rank and attempt.  Each half has one writer, so there is no lock; a
field is written by one aligned 8-byte store, so no reader sees half of it.  A beat makes no system call.

    0     magic, format version                          written once by the agent
    64    step, beats, beat time (ns), phase, …          written by the rank
    1024  order: stop, save; deadline; cause             written by the agent

Times are CLOCK_MONOTONIC nanoseconds: comparable between the processes of one node, and nowhere else.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.errors import FormatError

PAGE_BYTES = 4096
MAGIC = b"SRPG"
VERSION = 1

_HEADER = struct.Struct("<4sI")
_BEAT = struct.Struct("<qqqqq")  # step, beats, beat_ns, phase, phase_since_ns
_BEAT_AT = 64
_DONE = struct.Struct("<q")
_DONE_AT = 128
_ORDER = struct.Struct("<qqd")  # stop, save, deadline (wall clock, seconds; 0 = none)
_ORDER_AT = 1024
_CAUSE_AT = 1088
_CAUSE_BYTES = 32


class Phase(enum.IntEnum):
    """What a rank is doing; each phase has a limit of its own."""

    INIT = 0
    DATA = 1
    STEP = 2
    CHECKPOINT = 3
    EVALUATION = 4
    COMPILE = 5
    RESUME = 6
    USER = 7


@dataclass(frozen=True)
class Progress:
    """One look at a rank: ``step`` completed steps; ``beats`` counts reports; ``age_s`` seconds since the last."""

    step: int
    beats: int
    age_s: float
    phase: Phase
    phase_age_s: float
    done: bool


@dataclass(frozen=True)
class Orders:
    """What the agent wants of its rank.  ``deadline`` is wall-clock seconds, None where there is none."""

    stop: bool
    save: int
    deadline: float | None
    cause: str


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        page = mmap.mmap(fd, PAGE_BYTES)
    finally:
        os.close(fd)
    magic, version = _HEADER.unpack_from(page, 0)
    if magic != MAGIC or version > VERSION:
        raise FormatError(
            f"{os.fspath(path)} is not a progress page that this release can read",
            evidence=f"it starts with {magic!r}, version {version}; we know {MAGIC!r} up to {VERSION}",
            remedy="install the same release of slurm-resilience in the interpreter of the ranks and of the agents",
        )
    return page


class PageReader:
    """The agent's end: makes the page, reads progress, gives orders."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            self._page = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        now = time.monotonic_ns()
        _BEAT.pack_into(self._page, _BEAT_AT, -1, 0, now, Phase.INIT, now)
        _HEADER.pack_into(self._page, 0, MAGIC, VERSION)

    def read(self) -> Progress:
        """The rank's progress as of now; ``step`` is -1 until its first report."""
        step, beats, beat_ns, phase, since_ns = _BEAT.unpack_from(self._page, _BEAT_AT)
        (done,) = _DONE.unpack_from(self._page, _DONE_AT)
        now = time.monotonic_ns()
        try:
            known = Phase(phase)
        except ValueError:
            known = Phase.USER
        return Progress(step, beats, (now - beat_ns) / 1e9, known, (now - since_ns) / 1e9, bool(done))

    def order(self, *, stop: bool = False, save: int = 0, deadline: float | None = None, cause: str = "") -> None:
        """Ask the rank to stop, or to save (a number that grows with each request).  The stop flag goes last."""
        raw = cause.encode()[: _CAUSE_BYTES - 1]
        self._page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES] = raw.ljust(_CAUSE_BYTES, b"\0")
        _ORDER.pack_into(self._page, _ORDER_AT, 0, save, deadline or 0.0)
        if stop:
            _ORDER.pack_into(self._page, _ORDER_AT, 1, save, deadline or 0.0)

    def close(self) -> None:
        """Unmap and remove the page."""
        self._page.close()
        self.path.unlink(missing_ok=True)


class PageWriter:
    """The rank's end: beats, says its phase, reads orders."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._page = _map(path)
        self._step, self._beats, _, phase, self._since_ns = _BEAT.unpack_from(self._page, _BEAT_AT)
        self._phase = phase

    def beat(self, step: int) -> None:
        """Say that ``step`` steps are complete.  One pack into mapped memory: no call, no lock."""
        self._step = step
        self._beats += 1
        _BEAT.pack_into(self._page, _BEAT_AT, step, self._beats, time.monotonic_ns(), self._phase, self._since_ns)

    def enter(self, phase: Phase) -> Phase:
        """Say what the rank does from now on; returns what it did before, to go back to."""
        before = Phase(self._phase)
        self._phase = int(phase)
        self._beats += 1
        self._since_ns = time.monotonic_ns()
        _BEAT.pack_into(self._page, _BEAT_AT, self._step, self._beats, self._since_ns, self._phase, self._since_ns)
        return before

    def orders(self) -> Orders:
        """What the agent asks for now."""
        stop, save, deadline = _ORDER.unpack_from(self._page, _ORDER_AT)
        cause = bytes(self._page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES]).split(b"\0", 1)[0].decode(errors="replace")
        return Orders(bool(stop), save, deadline or None, cause)

    def done(self) -> None:
        """Say that the rank reached the end of its work, or of what it was asked for, and exits on purpose."""
        _DONE.pack_into(self._page, _DONE_AT, 1)
