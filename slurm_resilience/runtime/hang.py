"""Which rank hangs, if one does?  A pure look at what all ranks of an attempt show at one moment.

Each open section is judged by its own limit: an outer one that is over its limit counts, however fresh an inner one is.  A rank
that waits for another one, which is busy within its limit, does not hang: ranks wait for the one that evaluates.  They do not
wait for one that has already taken the step which they are in: it waits for them, in the checkpoint behind that step say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from slurm_resilience.progress.sections import Phase, word
from slurm_resilience.runtime.limits import STEP, Limits

_INIT = word(Phase.INIT)
_PATIENT = 4
_TOLD_LATE_S = 25.0  # a silence stands on the page for two windows
_MOST_STRETCHES = 64
_STARTING = frozenset({_INIT, word(Phase.RESUME)})


class Section(NamedTuple):
    """One open section as a beat tells it.  ``limit_s``: None where it is learned, inf where there is none."""

    name: str
    limit_s: float | None
    own_s: float
    total_s: float
    times: int

    @classmethod
    def parse(cls, raw: list[Any]) -> Section:
        name, limit, own_s, total_s, times = raw[:5]
        return cls(str(name), None if limit is None else math.inf if limit < 0 else float(limit), own_s, total_s, int(times))


class Look(NamedTuple):
    """One rank: ``beats`` 0 means that it never said anything; ``quiet_s`` is for how long nothing was seen from outside."""

    step: int
    beats: int
    done: bool
    sections: tuple[Section, ...]
    quiet_s: float


class Hang(NamedTuple):
    """The rank to name, for how long it was silent, and why that is too long."""

    rank: int
    silent_s: float
    why: str


class Judge:
    """Remembers who was busy when: who had to wait for somebody is silent only since then."""

    def __init__(self) -> None:
        self._busy_at: dict[int, tuple[float, int]] = {}  # rank -> (seen last at, the last step that it had completed then)
        self._stretches: dict[int, list[tuple[float, float]]] = {}  # rank -> (seen last at, for how long it had been busy then)

    def waited(self, seconds: float, now: float) -> float:
        """How much of a silence of so many seconds, told now, may have been spent waiting for somebody who was busy."""
        since = now - seconds - _TOLD_LATE_S
        lately = [length for found in self._stretches.values() for at, length in found if at >= since]
        return min(seconds, max(lately, default=0.0))

    def _note_busy(self, rank: int, look: Look, now: float) -> None:
        self._busy_at[rank] = now, look.step
        length = look.sections[1].total_s if len(look.sections) > 1 else look.sections[0].own_s
        found = self._stretches.setdefault(rank, [])
        if found and length >= found[-1][1] and now - found[-1][0] <= length:
            found.pop()  # it is still the same
        found.append((now, length))
        del found[:-_MOST_STRETCHES]

    def find(self, ranks: Mapping[int, Look], limits: Limits, *, init_s: float, now: float) -> Hang | None:
        """The rank that is furthest behind of those that hang; None when nobody does.

        A rank that never said anything is judged only when another one has: a script may do without a ``Run``.
        """
        living = {rank: look for rank, look in ranks.items() if not look.done}
        if not any(look.beats for look in ranks.values()):
            return None
        for rank, look in living.items():
            if _busy(look, limits):
                self._note_busy(rank, look, now)
        hangs: list[tuple[int, float, int, Hang]] = []
        for rank, look in living.items():
            found = _over(look, limits, init_s)
            if found is not None and not (found.waits and self._excused(rank, look.step, found, now)):
                hangs.append((look.step, -found.silent_s, rank, Hang(rank, found.silent_s, found.why)))
        return min(hangs)[3] if hangs else None

    def _excused(self, rank: int, step: int, found: _Over, now: float) -> bool:
        """Somebody else, who was not ahead, was busy so lately that this rank has not been silent for its whole limit since."""
        last = max((at for who, (at, theirs) in self._busy_at.items() if who != rank and theirs <= step), default=-math.inf)
        return now - last <= found.limit_s


class _Over(NamedTuple):
    """What is over its limit.  ``waits``: it may be waiting for others, so it is judged from when they were last busy."""

    limit_s: float
    silent_s: float
    why: str
    waits: bool


def _over(look: Look, limits: Limits, init_s: float) -> _Over | None:
    if not look.beats:
        silent_s = look.sections[0].own_s if look.sections else 0.0
        why = f"it has not said a word for {silent_s:.0f} s, while others have (limit {init_s:g} s)"
        return _Over(init_s, silent_s, why, waits=False) if silent_s > init_s else None
    for section in look.sections:
        if section.name == _INIT and look.quiet_s < init_s / 2 and section.own_s < _PATIENT * init_s:
            continue  # it reads, writes or computes: a large data set is looked through, a large model is built
        limit_s, time_s = _limit(section, limits), _time(section)
        if time_s > limit_s:
            if section.limit_s is not None:
                why = f"section {section.name!r} has taken {time_s:.1f} s (its limit is {limit_s:g} s)"
                return _Over(limit_s, time_s, why, waits=False)
            what = "no step" if section.name == STEP else f"no sign of life in {section.name!r}"
            return _Over(limit_s, time_s, f"{what} for {time_s:.1f} s ({limits.why(section.name, limit_s)})", waits=True)
    return None


def _busy(look: Look, limits: Limits) -> bool:
    """It is in a section, or still on its way to the first step, and within every limit: others may wait for it."""
    if not look.sections or not look.beats:
        return False
    if len(look.sections) == 1 and look.sections[0].name not in _STARTING:
        return False  # most ranks, most of the time: they train
    return all(_time(section) <= _limit(section, limits) for section in look.sections)


def _limit(section: Section, limits: Limits) -> float:
    return limits.of(section.name, section.times) if section.limit_s is None else section.limit_s


def _time(section: Section) -> float:
    return section.own_s if section.limit_s is None else section.total_s
