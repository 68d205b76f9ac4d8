"""One checkpoint as the index sees it."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.checkpoint import names

_MOST = 1 << 62  # what counts bytes, steps or ranks is below


class State(str, enum.Enum):
    """``writing`` is never in the index: a save that has not ended has no entry."""

    WRITING = "writing"
    COMMITTED = "committed"
    VERIFIED = "verified"
    QUARANTINED = "quarantined"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint: which directory, from where, how much, and what is known about it.

    ``manifest_sha256`` ties the entry to the manifest, and so to every byte.  ``attempts`` counts loads that were begun since
    the last successful verification; ``alarm`` is something odd that was seen when it was saved; ``doubt`` is what was wrong
    with it when somebody released it all the same.  Order is ``(attempt, step)``: never time, never the text of a name.
    """

    name: str
    step: int
    attempt: int
    world: int
    bytes: int
    manifest_sha256: str
    state: State = State.COMMITTED
    job_id: str = ""
    restart_count: int = 0
    node: str = ""
    boot_id: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    committed_at: float = 0.0
    save_s: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0
    by: str = ""
    reason: str = ""
    pinned: bool = False
    alarm: str = ""
    doubt: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        """Newest is greatest; the name only makes the order total."""
        return (self.attempt, self.step, self.name)

    @property
    def usable(self) -> bool:
        return self.state in (State.COMMITTED, State.VERIFIED)

    @property
    def readable(self) -> bool:
        """Its manifest could be read; what is not readable is never usable, whatever its marks say."""
        return bool(self.manifest_sha256)

    def with_marks(self, **marks: Any) -> Entry:
        return dataclasses.replace(self, **marks)

    def to_json(self) -> dict[str, Any]:
        """JSON values only; what equals its default is left out."""
        out: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                out[item.name] = value
            elif value != (item.default if item.default is not dataclasses.MISSING else {}):
                out[item.name] = str(value) if isinstance(value, State) else value
        return out

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        """The entry in ``value``; fields of newer releases are passed over.  Raises ValueError when it is not one."""
        known = {item.name for item in dataclasses.fields(cls)}
        try:
            fields = {key: inner for key, inner in value.items() if key in known}
            if "state" in fields:
                fields["state"] = State(fields["state"])
            entry = cls(**fields)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a checkpoint entry: {error}") from None
        odd = next(entry._odd(), "")
        if odd:
            raise ValueError(f"not a checkpoint entry: {odd} is {fields.get(odd)!r:.60}")
        return entry

    def _odd(self) -> Iterator[str]:
        """The fields that hold what nobody can count or compare with."""
        counts = ("step", "attempt", "world", "bytes", "restart_count", "attempts")
        yield from (name for name in counts if not is_count(getattr(self, name)))
        times = (getattr(self, name) for name in ("committed_at", "save_s"))
        if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in times):
            yield "committed_at"
        words = ("name", "manifest_sha256", "job_id", "node", "boot_id", "by", "reason", "alarm", "doubt")
        yield from (name for name in words if not isinstance(getattr(self, name), str))
        yield from (name for name in ("mesh", "metrics") if not isinstance(getattr(self, name), dict))
        if isinstance(self.name, str):
            parsed = names.parse(self.name)
            if parsed is None or (parsed.step, parsed.attempt) != (self.step, self.attempt):
                yield "name"


def is_count(value: object) -> bool:
    """A whole number that a file, a step or a rank can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
