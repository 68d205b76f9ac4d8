"""The layout of the page that a rank and its agent share, and both ends of it.

One file of 4096 bytes in ``/dev/shm`` per rank and attempt.  Each part has one writer, so there is no lock; a
field is written by one aligned 8-byte store, so no reader sees half of it.  A beat makes no system call.

    0     magic, format version                          written once by the agent
    64    step, beats, beat time (ns), phase, …          written by the rank
    160   own time of a step: count, mean (ns)           written by the rank; since version 2
    192   open sections, see :mod:`sections`             written by the rank; since version 2
    1024  order: stop, save; deadline; cause             written by the agent
    1280  what was seen, by name, see :mod:`sections`    written by the rank; since version 2

A page of version 1 is written to as if it were one of version 2: its reader passes over what it does not know.

Times are CLOCK_MONOTONIC nanoseconds: comparable between the processes of one node, and nowhere else.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.errors import FormatError
from slurm_resilience.progress.sections import Frame, Phase, Sections, Seen, read_frames, read_rows, short

__all__ = ["Orders", "PageReader", "PageWriter", "Phase", "Progress"]

PAGE_BYTES = 4096
MAGIC = b"SRPG"
VERSION = 2

_HEADER = struct.Struct("<4sI")
_BEAT = struct.Struct("<qqqqq")  # step, beats, beat_ns, phase, phase_since_ns
_BEAT_AT = 64
_DONE = struct.Struct("<q")
_DONE_AT = 128
_OWN = struct.Struct("<qq")  # how many steps were measured; a running mean of their own time, in ns
_OWN_AT = 160
_OWN_WINDOW = 20  # steps over which the mean runs
_ORDER = struct.Struct("<qqd")  # stop, save, deadline (wall clock, seconds; 0 = none)
_ORDER_AT = 1024
_CAUSE_AT = 1088
_CAUSE_BYTES = 32


@dataclass(frozen=True)
class Progress:
    """One look at a rank: ``step`` completed steps; ``beats`` counts reports; ``age_s`` seconds since the last.

    ``frames`` are its open sections, the outermost first; ``own_s`` is what a step costs it before it meets the others, over
    ``own_count`` steps that were measured.
    """

    step: int
    beats: int
    age_s: float
    phase: Phase
    phase_age_s: float
    done: bool
    frames: tuple[Frame, ...] = ()
    own_s: float = 0.0
    own_count: int = 0


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
        own_count, own_ns = _OWN.unpack_from(self._page, _OWN_AT)
        frames = read_frames(self._page, now)
        return Progress(
            step, beats, (now - beat_ns) / 1e9, known, (now - since_ns) / 1e9, bool(done), frames, own_ns / 1e9, own_count
        )  # fmt: skip

    def seen(self) -> dict[str, Seen]:
        """How long each kind of work took the rank so far, by name."""
        return read_rows(self._page)

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
    """The rank's end: beats, says what it is busy with, reads orders.  For the main thread alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._page = _map(path)
        self._step, self._beats, _, phase, self._since_ns = _BEAT.unpack_from(self._page, _BEAT_AT)
        self._phase = phase
        self._sections = Sections(self._page, phase, time.monotonic_ns())
        self._own_count, self._own_ns = 0, 0.0

    def beat(self, step: int) -> None:
        """Say that ``step`` steps are complete.  Three packs into mapped memory: no call, no lock."""
        self._step = step
        self._beats += 1
        now = time.monotonic_ns()
        self._sections.beat(now)
        _BEAT.pack_into(self._page, _BEAT_AT, step, self._beats, now, self._phase, self._since_ns)

    def enter(self, phase: Phase) -> Phase:
        """Say what the program as a whole does from now on; returns what it did before, to go back to."""
        now = time.monotonic_ns()
        before = Phase(self._sections.base.phase)
        self._sections.switch(int(phase), now)
        self._said(now)
        return before

    def push(self, name: str, phase: Phase, limit_s: float) -> None:
        """A section begins inside of what goes on.  ``limit_s``: seconds, ``NO_LIMIT`` or ``LEARNED``."""
        now = time.monotonic_ns()
        self._sections.push(short(name), int(phase), limit_s, now)
        self._said(now)

    def pop(self) -> None:
        """The innermost section ends."""
        now = time.monotonic_ns()
        self._sections.pop(now)
        self._said(now)

    def _said(self, now: int) -> None:
        """A sign of life: what the innermost section is."""
        top = self._sections.top
        self._phase, self._since_ns = top.phase, top.since
        self._beats += 1
        _BEAT.pack_into(self._page, _BEAT_AT, self._step, self._beats, now, self._phase, self._since_ns)

    def own(self, seconds: float) -> None:
        """Say what a step cost this rank before it had to meet the others."""
        self._own_count += 1
        weight = 1 / min(self._own_count, _OWN_WINDOW)
        self._own_ns += weight * (seconds * 1e9 - self._own_ns)
        _OWN.pack_into(self._page, _OWN_AT, self._own_count, int(self._own_ns))

    def orders(self) -> Orders:
        """What the agent asks for now."""
        stop, save, deadline = _ORDER.unpack_from(self._page, _ORDER_AT)
        cause = bytes(self._page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES]).split(b"\0", 1)[0].decode(errors="replace")
        return Orders(bool(stop), save, deadline or None, cause)

    def done(self) -> None:
        """Say that the rank reached the end of its work, or of what it was asked for, and exits on purpose."""
        _DONE.pack_into(self._page, _DONE_AT, 1)
