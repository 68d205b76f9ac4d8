"""The event file of a run: ``events.jsonl``, append-only, one fact a line, written by the supervisor alone.

Every line is ``{"v": 1, "seq": n, "t": wall seconds, "restart": r, "attempt": a, "event": "past_tense", …}``; ``node``,
``rank``, ``step`` and the rest follow where they apply.  ``seq`` only grows over the life of the run, over
requeues too, so order never depends on clocks of different nodes.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import FormatError

VERSION = 1
FILE_NAME = "events.jsonl"
_STEP_REPORT = b'"event": "step_reported"'
_STOPPED = b'"event": "attempt_stopped"'
_STEP = re.compile(rb'"step": (\d+)')
# How far apart two lines may stand and still be put into order.  A supervisor that was replaced may write for a second more.
_WINDOW = 512
_RESERVED = frozenset({"v", "seq", "t", "restart", "attempt", "event"})


class EventWriter:
    """The one writer.  After a torn line the next fact starts on a line of its own."""

    def __init__(self, run_dir: str | os.PathLike[str], *, restart: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.restart = restart
        self.attempt = 0
        self._clock = clock
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._seq = _last_seq(self.path)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, event: str, /, *, t: float | None = None, attempt: int | None = None, **fields: Any) -> dict[str, Any]:
        """Append one fact and return it.  ``t`` is when it happened, if that was not now.

        Raises ValueError for a field whose name belongs to the envelope, OSError when the file cannot be written.
        """
        clash = _RESERVED & fields.keys()
        if clash:
            raise ValueError(f"event fields {sorted(clash)} belong to the envelope")
        self._seq += 1
        line = {
            "v": VERSION,
            "seq": self._seq,
            "t": round(self._clock.time() if t is None else t, 6),
            "restart": self.restart,
            "attempt": self.attempt if attempt is None else attempt,
            "event": event,
            **{key: value for key, value in fields.items() if value is not None},
        }
        self._append((json.dumps(line, default=str) + "\n").encode())
        return line

    def _append(self, line: bytes) -> None:
        """The whole line.  A disk that becomes full takes the part that fits and refuses the rest: what comes next must not
        be glued to that part."""
        view = memoryview(b"\n" + line if self._torn else line)
        while view:
            view = view[os.write(self._fd, view) :]
            self._torn = bool(view)

    def close(self) -> None:
        os.close(self._fd)


def read_events(run_dir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The facts of a run in the order of their sequence numbers; torn or foreign lines are passed over.

    Clocks do not count.  Memory is bounded by some hundred lines.  A run without an event file yields nothing.
    Raises :class:`FormatError` for events of a newer release.
    """
    try:
        file = open(Path(run_dir) / FILE_NAME, "rb")
    except FileNotFoundError:
        return
    with file:
        yield from _in_order(filter(None, map(parse, file)))


def _in_order(facts: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By sequence number, then attempt, as far as the window reaches; what has no number stays where it stands."""
    waiting: list[tuple[int, int, int, dict[str, Any]]] = []
    last = 0
    for position, fact in enumerate(facts):
        seq, attempt = fact.get("seq"), fact.get("attempt")
        last = seq if isinstance(seq, int) else last
        heapq.heappush(waiting, (last, attempt if isinstance(attempt, int) else 0, position, fact))
        if len(waiting) > _WINDOW:
            yield heapq.heappop(waiting)[3]
    while waiting:
        yield heapq.heappop(waiting)[3]


def read_for_standing(run_dir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The facts of a run, in order, without most of the step reports, which are the mass of a long run's file.

    The last one before any other fact is kept, the first after it, and the one with which training is again where it was
    before it went back: what is folded from them is where training was when something else happened, how fast it went, and
    when it had caught up.  A gigabyte takes seconds, in bounded memory.
    """
    try:
        file = open(Path(run_dir) / FILE_NAME, "rb")
    except FileNotFoundError:
        return
    with file:
        yield from _in_order(filter(None, map(parse, _without_most_reports(file))))


def _without_most_reports(lines: Iterable[bytes]) -> Iterator[bytes]:
    last: bytes | None = None
    follows = behind = False
    furthest = -1
    for raw in lines:
        if _STEP_REPORT in raw:
            if follows:
                behind = _step(raw) < furthest
                yield raw
                last, follows = None, False
            elif behind and _step(raw) >= furthest:
                behind = False
                yield raw
                last = None
            else:
                last = raw
        else:
            if last is not None:
                furthest = max(furthest, _step(last))
                yield last
            if _STOPPED in raw:  # how far the ranks were, by their heartbeats
                furthest = max(furthest, _step(raw))
            yield raw
            last, follows = None, True
    if last is not None:
        yield last


def _step(raw: bytes) -> int:
    """The step in a line, -1 where it has none."""
    found = _STEP.search(raw)
    return int(found[1]) if found else -1


def parse(raw: bytes) -> dict[str, Any] | None:
    """The fact in a line with its end; None for one that is torn, or no fact.  Raises :class:`FormatError` for a newer one."""
    if not raw.endswith(b"\n"):
        return None
    try:
        fact = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(fact, dict) or not isinstance(fact.get("event"), str) or not isinstance(fact.get("t"), int | float):
        return None
    if isinstance(fact.get("v"), int) and fact["v"] > VERSION:
        raise FormatError(
            "These events were not written by this release",
            evidence=f"their version is {fact['v']}; we read up to {VERSION}",
            remedy="use the newer release of slurm-resilience",
        )
    for name in ("attempt", "restart"):
        if not isinstance(fact.get(name), int):
            fact[name] = 0
    return fact


def _last_seq(path: Path) -> int:
    """The highest sequence number, read from the end of the file."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        block = 1 << 16
        while end:
            start = max(0, end - block)
            file.seek(start)
            lines = file.read(end - start).split(b"\n")
            for raw in reversed(lines[1:] if start else lines):
                fact = parse(raw + b"\n")
                if fact is not None and isinstance(fact.get("seq"), int):
                    return int(fact["seq"])
            if not start:
                return 0
            block *= 4
    return 0
