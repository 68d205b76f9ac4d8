"""Which checkpoints stay: a pure decision over entries, with the reason for each that is kept.

Only sound entries count: usable ones of which nobody knows that their bytes are bad.  Whatever the policy says, these stay:
pinned ones, the newest verified one, the newest sound one, those of a newer attempt and those that somebody reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from slurm_resilience.checkpoint.entry import Entry, State


@dataclass(frozen=True)
class Retention:
    """What to keep besides what always stays.

    ``every_steps`` and ``every_hours`` keep the first checkpoint of each such stretch for ever; ``best`` names a recorded
    metric, of which the ``best_count`` lowest (or highest) are kept.  Quarantined ones are evidence: the newest few stay.
    """

    keep_last: int = 3
    every_steps: int | None = None
    every_hours: float | None = None
    best: str | None = None
    best_count: int = 1
    best_is: str = "lowest"
    keep_quarantined: int = 2

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.best_count < 1 or self.keep_quarantined < 0:
            raise ValueError("keep_last and best_count are at least 1, keep_quarantined at least 0")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps is at least 1, not {self.every_steps}")
        if self.every_hours is not None and not (self.every_hours > 0 and math.isfinite(self.every_hours)):
            raise ValueError(f"every_hours is a number above 0, not {self.every_hours}")
        if self.best_is not in ("lowest", "highest"):
            raise ValueError(f"best_is is 'lowest' or 'highest', not {self.best_is!r}")


def kept(
    entries: Iterable[Entry],
    policy: Retention,
    *,
    attempt: int | None = None,
    being_read: Collection[str] = (),
    bad: Collection[str] = (),
) -> dict[str, str]:
    """The names that stay, each with its first reason; everything else may go.  ``bad`` ones stay, and count for nothing."""
    newest_first = sorted(entries, key=lambda entry: entry.order, reverse=True)
    usable = [entry for entry in newest_first if is_sound(entry, bad)]
    why: dict[str, str] = {}

    def keep(chosen: Iterable[Entry], reason: str) -> None:
        for entry in chosen:
            why.setdefault(entry.name, reason)

    keep((entry for entry in newest_first if entry.pinned), "pinned")
    keep((entry for entry in newest_first if attempt is not None and entry.attempt > attempt), "of a newer attempt")
    keep((entry for entry in newest_first if entry.name in being_read), "being read")
    keep((entry for entry in newest_first if entry.usable and not is_sound(entry, bad)), "bad, and nobody has quarantined it")
    keep([entry for entry in usable if entry.state is State.VERIFIED][:1], "the newest verified one")
    keep([entry for entry in usable if not entry.attempts][:1], "the newest one that nobody failed to load")
    keep(usable[: policy.keep_last], f"one of the newest {policy.keep_last}")
    if policy.every_steps:
        stride = policy.every_steps
        keep(_first_of_each(usable, lambda entry: entry.step // stride), f"first in {stride} steps")
    if policy.every_hours:
        span_s = policy.every_hours * 3600
        keep(_first_of_each(usable, lambda entry: int(entry.committed_at // span_s)), f"first in {policy.every_hours:g} hours")
    if policy.best:
        scored = [(value, entry) for entry in usable if (value := _number(entry, policy.best)) is not None]
        scored.sort(key=lambda pair: pair[0], reverse=policy.best_is == "highest")
        keep((entry for _, entry in scored[: policy.best_count]), f"{policy.best_is} {policy.best}")
    keep([entry for entry in newest_first if not entry.usable][: policy.keep_quarantined], "quarantined, kept as evidence")
    return why


def is_sound(entry: Entry, bad: Collection[str] = ()) -> bool:
    """Whether this may be the one checkpoint that is left."""
    return entry.usable and not entry.doubt and entry.name not in bad


def _first_of_each(newest_first: list[Entry], bucket: Callable[[Entry], int]) -> list[Entry]:
    first: dict[int, Entry] = {}
    for entry in newest_first:
        first[bucket(entry)] = entry
    return list(first.values())


def _number(entry: Entry, metric: str) -> float | None:
    value = entry.metrics.get(metric)
    if isinstance(value, int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None
