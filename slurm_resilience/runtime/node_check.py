"""Which node does a check of the nodes speak against?  Pure arithmetic on what each of them said.

Each node computes alone, then with a partner, then with another one: a bad node is told from its partners by what they do
without it.  Compared is with the middle of the others, since nobody knows how fast a node of this kind has to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Key = TypeVar("Key")

ROUNDS = 2
# Slower than so many times the middle of the others, and by more than what a busy machine costs.
TIMES = 2.0
_AT_LEAST_S = 0.05


@dataclass
class Said:
    """What one node said.  ``alone_s``: a computation by itself.  ``rounds``: seconds with each partner, None for a failure."""

    alone_s: float | None = None
    rounds: dict[int, float | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.alone_s is not None and len(self.rounds) == ROUNDS


@dataclass(frozen=True)
class Verdict:
    """``suspects``: node → reason.  ``inconclusive``: why nobody can be named, "" when the check tells something."""

    suspects: dict[str, str]
    inconclusive: str = ""


def groups(count: int, number: int) -> list[tuple[int, ...]]:
    """Who works with whom in this round: pairs, and one of three among an odd number of nodes.

    Nobody has the same partner twice, but for two of an odd number and for those of fewer than four.
    """
    order = [(place + number) % count for place in range(count)]
    pairs = [order[start : start + 2] for start in range(0, count - 1, 2)]
    if count % 2:
        pairs[-1].append(order[-1])
    return [tuple(pair) for pair in pairs]


def judge(names: Sequence[str], said: Mapping[str, Said]) -> Verdict:
    """Name the nodes that failed or were slow, by what they said until the end of the check."""
    heard = [name for name in names if name in said]
    if 2 * len(heard) < len(names):
        return Verdict({}, f"{len(names) - len(heard)} of {len(names)} nodes said nothing in time")
    suspects = {name: "it said nothing in a check in which the others did" for name in names if name not in said}
    suspects |= _slow_alone(said)
    suspects |= _failing(names, said, suspects)
    suspects |= _slow_together(names, said, suspects)
    if 2 * len(suspects) > len(names):
        return Verdict({}, f"{len(suspects)} of {len(names)} nodes failed or were slow, so the cause is none of them alone")
    if not suspects and not any(seconds is not None for each in said.values() for seconds in each.rounds.values()):
        return Verdict({}, "no two nodes could work together")
    return Verdict(suspects)


def _slow_alone(said: Mapping[str, Said]) -> dict[str, str]:
    times = {name: each.alone_s for name, each in said.items() if each.alone_s is not None}
    return {
        name: f"in a check its computation took {seconds:.3f} s, that of others {usual:.3f} s"
        for name, seconds, usual in _outliers(times)
    }


def _failing(names: Sequence[str], said: Mapping[str, Said], known: Mapping[str, str]) -> dict[str, str]:
    """Those that could work with nobody, where a partner could with somebody else."""
    out = {}
    for name in said:
        partners = list(_partners(names, name))
        if name in known or any(_seconds(said, name, number) is not None for number in range(ROUNDS)):
            continue
        if any(partner in known for _, others in partners for partner in others):
            continue  # that explains it, or may
        able = [
            other
            for number, others in partners
            for other in others
            if any(_seconds(said, other, each) is not None for each in range(ROUNDS) if each != number)
        ]
        if able:
            out[name] = f"in a check it could not work with {' or '.join(dict.fromkeys(able))}, which could with another node"
    return _told_apart(names, out)


def _slow_together(names: Sequence[str], said: Mapping[str, Said], known: Mapping[str, str]) -> dict[str, str]:
    """Those that were slow with each of their partners."""
    slow: dict[str, list[tuple[float, float]]] = {}
    for number in range(ROUNDS):
        times: dict[tuple[str, ...], float] = {}
        for group in groups(len(names), number):
            members = tuple(names[place] for place in group)
            seconds = [value for name in members if (value := _seconds(said, name, number)) is not None]
            if seconds and not any(name in known for name in members):
                times[members] = max(seconds)
        for members, took, usual in _outliers(times):
            for name in members:
                slow.setdefault(name, []).append((took, usual))
    out = {
        name: f"in a check it took {min(found)[0]:.3f} s with each of two partners, other pairs {min(found)[1]:.3f} s"
        for name, found in slow.items()
        if len(found) == ROUNDS and len(names) > 3
    }
    return _told_apart(names, out)


def _told_apart(names: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """Without those that were together in every round, as two of an odd number of nodes are: it is one of them."""

    def mates(name: str) -> set[str]:
        return set.intersection(*(set(others) for _, others in _partners(names, name)))

    return {name: why for name, why in found.items() if not mates(name) & found.keys()}


def _outliers(times: Mapping[Key, float]) -> Iterator[tuple[Key, float, float]]:
    for key, seconds in times.items():
        others = sorted(value for other, value in times.items() if other != key)
        if others:
            usual = others[(len(others) - 1) // 2]
            if seconds > TIMES * usual and seconds - usual > _AT_LEAST_S:
                yield key, seconds, usual


def _partners(names: Sequence[str], name: str) -> Iterator[tuple[int, list[str]]]:
    place = names.index(name)
    for number in range(ROUNDS):
        for group in groups(len(names), number):
            if place in group:
                yield number, [names[other] for other in group if other != place]


def _seconds(said: Mapping[str, Said], name: str, number: int) -> float | None:
    each = said.get(name)
    return each.rounds.get(number) if each is not None else None
