"""What a run has on record, and waiting for something to be there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


class DemoFailed(Exception):
    """The demo did not see what it is there to show."""


def wait_for(what: str, look: Callable[[], Found | None], within_s: float) -> Found:
    """What ``look`` finds, as soon as it finds something; DemoFailed when that takes too long."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} did not happen within {within_s:g} s")
        time.sleep(0.1)


class Record:
    """The files of one run, read from outside while it goes on."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines if line]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == kind]

    def step(self) -> int:
        """The newest step on the loss curve."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def first_steps(self, nodes: int) -> list[dict[str, Any]]:
        """The first_step events of attempts that ran on this many nodes."""
        attempts = {event["attempt"] for event in self.of("attempt_started") if len(event["nodes"]) == nodes}
        return [event for event in self.of("first_step") if event["attempt"] in attempts]

    def failed(self) -> str | None:
        """Why the run ended badly, if it did and nobody has started it again."""
        ends = [event for event in self.events() if event["event"] in ("run_failed", "allocation_started")]
        if not ends or ends[-1]["event"] != "run_failed":
            return None
        return f"{ends[-1]['cause']}: {ends[-1]['reason']}"
