"""What really happened in a run, as its files tell it: events, the loss curve, the checkpoint index, and the faults we did.

Read through the product's own readers where a user would (``read_events``), and by plain JSON for the rest, so that a
fault in a writer cannot hide behind the same fault in its reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.observe.events import read_events

Event = dict[str, Any]


@dataclass(frozen=True)
class Fired:
    """One fault that was really done: the process was alive before and is gone after, by ``pid`` and start time."""

    kind: str
    node: str
    pid: int
    t: float
    step: int
    moment: str
    on_batch_host: bool


@dataclass
class History:
    """All facts of one run.  ``curve`` has one entry per line of metrics.jsonl, in the order of the file."""

    events: list[Event]
    curve: list[dict[str, Any]]
    state: dict[str, Any]
    checkpoints: dict[str, int]  # names of the folders that are on disk and committed -> step
    faults: list[Fired] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)  # old ranks seen alive beside new ones
    left_alive: list[str] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]

    def attempts(self) -> list[int]:
        return sorted({event["attempt"] for event in self.of("attempt_started")})

    def attempt_events(self, attempt: int) -> list[Event]:
        return [event for event in self.events if event["attempt"] == attempt]

    def losses(self) -> dict[int, dict[int, float]]:
        """step -> attempt -> loss."""
        out: dict[int, dict[int, float]] = {}
        for line in self.curve:
            out.setdefault(line["step"], {})[line["attempt"]] = line["loss"]
        return out

    def final_curve(self) -> dict[int, float]:
        """step -> the loss that counts: that of the newest attempt which took the step."""
        return {step: by_attempt[max(by_attempt)] for step, by_attempt in sorted(self.losses().items())}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole JSON lines of a file; a torn last line is not there yet."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def read_history(run_dir: Path, *, checkpoints: dict[str, int]) -> History:
    state = run_dir / "state.json"
    return History(
        events=list(read_events(run_dir)),
        curve=list(read_lines(run_dir / "metrics.jsonl")),
        state=json.loads(state.read_text()) if state.exists() else {},
        checkpoints=checkpoints,
    )
