"""What is to be done, in order, and what time it is: the one thing that the parts of the coordinator share."""

from __future__ import annotations

from typing import Any

from slurm_resilience._clock import Clock
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.inputs import Output, Record, Send
from slurm_resilience.runtime.messages import Message


class Outbox:
    """Collects outputs between :meth:`open` and :meth:`take`; time stands still in between.

    ``now`` is monotonic, ``wall`` wall clock; ``attempt`` is the number that events carry.  Events go into the
    history at the moment when they are put.
    """

    def __init__(self, clock: Clock, history: History, *, restart: int, attempt: int) -> None:
        self.history, self.restart, self.attempt = history, restart, attempt
        self._clock = clock
        self._items: list[Output] = []
        self.now, self.wall = clock.monotonic(), clock.time()

    def open(self) -> None:
        """Look at the clock."""
        self.now, self.wall = self._clock.monotonic(), self._clock.time()

    def take(self) -> list[Output]:
        """Everything put since the last time."""
        items, self._items = self._items, []
        return items

    def put(self, output: Output) -> None:
        self._items.append(output)

    def send(self, conn: int | None, message: Message) -> None:
        """Say something to an agent, if there is one."""
        if conn is not None:
            self._items.append(Send(conn, message))

    def record(self, event: str, **fields: Any) -> None:
        """An event that happened now, in the current attempt; fields that are None are left out."""
        self.note(event, fields)

    def note(self, event: str, fields: dict[str, Any], *, t: float | None = None, attempt: int | None = None) -> None:
        """An event of another time or attempt."""
        number = self.attempt if attempt is None else attempt
        known = {key: value for key, value in fields.items() if value is not None}
        self.history.apply({"event": event, "attempt": number, "restart": self.restart, **known})
        self._items.append(Record(event, known, self.wall if t is None else t, number))
