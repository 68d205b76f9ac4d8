"""What a rank is busy with: one clock for each section that is open, and how long each kind of work took so far.

The rank writes frames (the open sections, the outermost first) and rows (what was seen, by name) into its page; its agent
reads them.
A frame has two clocks.  ``total`` runs from entering to leaving.  ``own`` stands still while an inner section is open and
starts again at every beat, so that it measures silence: what is learned, and what automatic limits judge, is own time.

Nothing here makes a system call or takes a lock.  A reader that comes in the middle of a change looks again; frames have one
writer, the rank's main thread.
"""

from __future__ import annotations

import enum
import hashlib
import math
import mmap
import struct
from typing import NamedTuple

MOST_FRAMES, MOST_ROWS = 8, 24
WINDOW_NS = 10_000_000_000  # the longest silence of this and the last window is shown; agents look every few seconds
WARM_UP = 3  # the first steps of an attempt pay for compilation, allocation and caches: they teach nothing
_TURN = struct.Struct("<qq")  # odd while frames change; how many are open
_TURN_AT = 192
_FRAME = struct.Struct("<qqqqd24s")  # own_ns, at_ns (0: paused), since_ns, phase, limit, name
_CLOCK = struct.Struct("<qq")
_FRAMES_AT = 256
_ROW = struct.Struct("<qq")  # count, longest_ns
_NAME_BYTES = 24
_ROW_BYTES = _ROW.size + _NAME_BYTES
_ROWS_AT = 1280
NO_LIMIT = math.inf
LEARNED = math.nan


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


class Frame(NamedTuple):
    """An open section.  ``limit_s``: what its user said, NO_LIMIT for none, LEARNED (nan) for one from experience; ``times``:
    how often this name was left, or beaten in, before."""

    name: str
    phase: int
    limit_s: float
    own_s: float
    total_s: float
    times: int


class Seen(NamedTuple):
    """How often a kind of work was seen, and its longest own time lately."""

    times: int
    longest_s: float


class _Row:
    """What was seen under one name; ``at`` is -1 when the page has no room for another name."""

    __slots__ = ("at", "before", "count", "longest", "until")

    def __init__(self, at: int) -> None:
        self.at, self.count, self.longest = at, 0, 0
        self.before, self.until = 0, 0  # the longest of the window before, and when this one ends


class _Open:
    """One open section; times are monotonic nanoseconds.  ``at`` is 0 while an inner one is open."""

    __slots__ = ("at", "limit", "name", "own", "phase", "row", "since")

    def __init__(self, name: str, phase: int, limit: float, now: int, row: _Row) -> None:
        self.name, self.phase, self.limit, self.row = name, phase, limit, row
        self.since = self.at = now
        self.own = 0


class Sections:
    """The rank's end.  The first frame is the phase of the program as a whole; sections are entered on top of it."""

    def __init__(self, page: mmap.mmap, phase: int, now: int) -> None:
        self._page = page
        self._rows: dict[str, _Row] = {}
        self._stack: list[_Open] = []
        self._too_deep = 0
        self._turn = 0
        self._stack.append(self._opened(word(phase), phase, LEARNED, now))
        self._top = self._stack[0]
        self._publish()

    @property
    def base(self) -> _Open:
        return self._stack[0]

    @property
    def top(self) -> _Open:
        """The innermost section."""
        return self._top

    def beat(self, now: int) -> None:
        """Work goes on: every own clock starts again."""
        top = self._top
        row = top.row
        gap = top.own + now - top.at
        top.own, top.at = 0, now
        row.count += 1
        if now > row.until:
            row.before, row.longest, row.until = row.longest, 0, now + WINDOW_NS
        if gap > row.longest and (row.count > WARM_UP or top is not self._stack[0]):
            row.longest = gap
        if row.at >= 0:
            _ROW.pack_into(self._page, row.at, row.count, max(row.before, row.longest))
        if len(self._stack) == 1:
            # One frame: both words in one store; a reader sees at worst the clock of before the beat.
            _CLOCK.pack_into(self._page, _FRAMES_AT, 0, now)
        else:
            for each in self._stack[:-1]:
                each.own = 0
            self._publish()

    def switch(self, phase: int, now: int) -> None:
        """The program as a whole does something else from now on."""
        base = self._stack[0]
        if phase == base.phase:
            return
        if base.phase != Phase.STEP:  # silence after the last step ended with no step
            self._learn(base, now)
        self._stack[0] = fresh = self._opened(word(phase), phase, LEARNED, now)
        if len(self._stack) > 1:
            fresh.at = 0
        else:
            self._top = fresh
        self._publish()

    def push(self, name: str, phase: int, limit: float, now: int) -> None:
        """A section begins; those around it are judged by their total time or not at all until it ends."""
        if len(self._stack) == MOST_FRAMES:
            self._too_deep += 1  # counts as part of the innermost one that has a place
            return
        top = self._top
        top.own += now - top.at
        top.at = 0
        self._top = self._opened(name, phase, limit, now)
        self._stack.append(self._top)
        self._publish()

    def pop(self, now: int) -> None:
        """The innermost section ends."""
        if self._too_deep:
            self._too_deep -= 1
            return
        if len(self._stack) == 1:
            return
        self._learn(self._stack.pop(), now)
        self._top = self._stack[-1]
        self._top.at = now
        self._publish()

    def _opened(self, name: str, phase: int, limit: float, now: int) -> _Open:
        row = self._rows.get(name)
        if row is None:
            number = len(self._rows)
            row = self._rows[name] = _Row(_ROWS_AT + number * _ROW_BYTES if number < MOST_ROWS else -1)
            if row.at >= 0:
                _ROW.pack_into(self._page, row.at, 0, 0)
                self._page[row.at + _ROW.size : row.at + _ROW_BYTES] = _raw(name)
        return _Open(name, phase, limit, now, row)

    def _learn(self, one: _Open, now: int) -> None:
        row = one.row
        row.count += 1
        row.longest = max(row.longest, one.own + (now - one.at if one.at else 0))
        if row.at >= 0:
            _ROW.pack_into(self._page, row.at, row.count, row.longest)

    def _publish(self) -> None:
        self._turn += 1
        _TURN.pack_into(self._page, _TURN_AT, self._turn, len(self._stack))
        for number, each in enumerate(self._stack):
            where = _FRAMES_AT + number * _FRAME.size
            _FRAME.pack_into(
                self._page, where, each.own, each.at, each.since, each.phase, each.limit, _raw(each.name)
            )  # fmt: skip
        self._turn += 1
        _TURN.pack_into(self._page, _TURN_AT, self._turn, len(self._stack))


def read_frames(page: mmap.mmap, now: int) -> tuple[Frame, ...]:
    """The open sections, the outermost first; none on the page of an older release, or of a rank that said nothing."""
    seen = read_rows(page)
    raw: list[tuple[int, int, int, int, float, bytes]] = []
    for _ in range(5):
        turn, count = _TURN.unpack_from(page, _TURN_AT)
        raw = [_FRAME.unpack_from(page, _FRAMES_AT + at * _FRAME.size) for at in range(min(max(0, count), MOST_FRAMES))]
        if turn % 2 == 0 and _TURN.unpack_from(page, _TURN_AT) == (turn, count):
            break  # a rank that was stopped in the middle of a change is taken as it is found
    frames = []
    for own, at, since, phase, limit, raw_name in raw:
        name = _text(raw_name)
        own_s = (own + (max(0, now - at) if at else 0)) / 1e9
        frames.append(Frame(name, phase, limit, own_s, max(0, now - since) / 1e9, seen.get(name, Seen(0, 0.0)).times))
    return tuple(frames)


def read_rows(page: mmap.mmap) -> dict[str, Seen]:
    """What was seen so far, by name."""
    out: dict[str, Seen] = {}
    for number in range(MOST_ROWS):
        at = _ROWS_AT + number * _ROW_BYTES
        name = _text(page[at + _ROW.size : at + _ROW_BYTES])
        if not name:
            break
        count, longest = _ROW.unpack_from(page, at)
        out[name] = Seen(count, longest / 1e9)
    return out


def word(phase: int) -> str:
    """The name of a phase in events and limits."""
    return _WORDS.get(phase) or str(int(phase))


_WORDS: dict[int, str] = {int(phase): phase.name.lower() for phase in Phase}


def short(name: str) -> str:
    """A name that fits; long ones stay different from each other."""
    raw = name.encode()
    if len(raw) < _NAME_BYTES:
        return name
    return raw[:14].decode(errors="ignore") + "~" + hashlib.sha256(raw).hexdigest()[:8]


def _raw(name: str) -> bytes:
    return name.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
