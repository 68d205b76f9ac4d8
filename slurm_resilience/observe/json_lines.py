"""The supervisor's log for programs: one JSON object a line, the sentence that people read among its fields."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_resilience.observe.json_text import dumps
from slurm_resilience.observe.narrator import Narrator

_ERRORS = frozenset({"fault_detected", "exception", "run_failed", "requeue_failed", "agent_lost", "agent_start_failed"})
_WARNINGS = frozenset({"warning_received", "warning_explained", "checkpoint_failed", "checkpoint_quarantined", "node_drained",
                       "node_gone", "straggler_found", "rank_quiet", "stop_deadline_passed", "supervisor_took_over",
                       "supervisor_was_frozen", "launched_cold"})  # fmt: skip
_ENVELOPE = frozenset({"v", "seq", "t"})


class JsonNarrator:
    """Like :class:`Narrator`, a JSON object for each of its lines: time, level, message, and the event's own fields."""

    def __init__(self, **about: Any) -> None:
        self._narrator = Narrator()
        self._about = about

    def catch_up(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take what was told earlier into account, without telling it again."""
        self._narrator.catch_up(events)

    def lines(self, event: Mapping[str, Any]) -> list[str]:
        """The lines for one event."""
        name = str(event["event"])
        level = "error" if name in _ERRORS else "warning" if name in _WARNINGS else "info"
        fields = {key: value for key, value in event.items() if key not in _ENVELOPE}
        told = [line.partition("  ")[2] for line in self._narrator.lines(event)]
        return [line(text, level=level, t=float(event["t"]), **{**self._about, **fields}) for text in told]


def line(message: str, *, level: str = "info", t: float | None = None, **fields: Any) -> str:
    """One object.  ``t``: wall-clock seconds; now where it is left out."""
    t = time.time() if t is None else t
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(t))}.{int(t % 1 * 1000):03d}Z"
    return dumps({"time": stamp, "level": level, "message": message, **fields})
