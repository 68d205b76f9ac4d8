"""Where agents come from: the protocol between the supervisor and whatever starts processes on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Ended:
    """What had started the agent of ``node`` is gone: its code, and the last thing that it said."""

    node: str
    code: int
    tail: str


class Backend(Protocol):
    """Starts agents.  No method may block for longer than it takes to fork."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the allocation, the supervisor's own first where that is known."""
        ...

    def start(self, node: str) -> None:
        """Start an agent there; what came before it on this node is given up."""
        ...

    def settled(self, node: str) -> None:
        """The agent of this node has reached the supervisor."""
        ...

    def poll(self) -> list[Ended]:
        """Carriers that have ended since the last call."""
        ...

    def close(self) -> None:
        """Give up everything that is still there."""
        ...


def last_words(log: Path, start: int) -> str:
    """The last lines that were written into ``log`` after ``start`` bytes, on one line; "" when there are none."""
    try:
        with open(log, "rb") as file:
            file.seek(start)
            text = file.read(16_384).decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "Exited with exit code" not in line]
    return " | ".join(lines[-4:])[:1500]
