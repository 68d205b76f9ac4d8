"""The one thread that writes into the run folder and on stdout, so that a file system that hangs cannot stop the supervisor.

Were the loop to write by itself, a stall of a few seconds would look to the agents like a dead supervisor, and they
would stop their ranks.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.observe.narrator import Narrator
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.inputs import AttemptWritten, Input, Record, Superseded, WriteAttempt, WriteIncident, WriteStatus
from slurm_resilience.runtime.messages import WireError
from slurm_resilience.runtime.run_folder import RunFolder

_CHECK_EVERY_S = 5.0
_RETRY_S = 1.0
_MOST_WAITING = 100_000


@dataclass(frozen=True)
class _Flush:
    done: threading.Event


class Scribe(threading.Thread):
    """Takes outputs in order and does them in order.

    ``epoch`` is ours: before an attempt number is written, and now and then, it makes sure that no other supervisor has
    announced itself, and answers ``Superseded`` when one has.  ``answer`` and ``show`` are called from this thread.
    Events that cannot be written wait, in order, until they can be.
    """

    def __init__(
        self,
        folder: RunFolder,
        events: EventWriter,
        *,
        epoch: int,
        answer: Callable[[Input], None],
        show: Callable[[str], None],
    ) -> None:
        super().__init__(name="scribe", daemon=True)
        self._folder, self._events, self._epoch = folder, events, epoch
        self._answer, self._show = answer, show
        self._narrator = Narrator()
        self._narrator.catch_up(read_events(folder.path))
        self._todo: queue.SimpleQueue[Record | WriteAttempt | WriteStatus | WriteIncident | _Flush | str] = queue.SimpleQueue()
        self._late: deque[Record] = deque(maxlen=_MOST_WAITING)
        self._superseded = False

    def put(self, output: Record | WriteAttempt | WriteStatus | WriteIncident) -> None:
        """Have it written.  Returns at once."""
        self._todo.put(output)

    def say(self, text: str) -> None:
        """Have a line shown that is no event.  Returns at once."""
        self._todo.put(text)

    def flush(self, *, within_s: float) -> bool:
        """Wait until everything put so far is written; False when that took too long."""
        done = threading.Event()
        self._todo.put(_Flush(done))
        return done.wait(within_s)

    def run(self) -> None:
        checked = time.monotonic()
        while True:
            try:
                output = self._todo.get(timeout=_RETRY_S)
            except queue.Empty:
                output = None
            try:
                self._catch_up()
                if time.monotonic() - checked > _CHECK_EVERY_S:
                    checked = time.monotonic()
                    self._still_ours()
                if output is not None:
                    self._do(output)
            except OSError as error:
                self._tell(f"cannot write into {self._folder.path}: {error}; going on, and trying again")
                if isinstance(output, Record):
                    self._late.append(output)
                elif output is not None:
                    time.sleep(_RETRY_S)
                    self._todo.put(output)

    def _do(self, output: Record | WriteAttempt | WriteStatus | WriteIncident | _Flush | str) -> None:
        match output:
            case str():
                self._tell(output)
            case Record():
                if self._late:
                    self._late.append(output)
                else:
                    self._write(output)
            case WriteAttempt(number):
                if self._still_ours():
                    self._folder.write_attempt(number)
                    self._answer(AttemptWritten(number))
            case WriteStatus(status):
                if not self._superseded:
                    self._folder.write_status(status)
            case WriteIncident(attempt, record):
                if not self._superseded:
                    self._folder.write_incident(attempt, record)
            case _Flush(done):
                done.set()

    def _tell(self, line: str) -> None:
        """Nobody may be there to read it, or there is no room for it; what is written must not depend on that."""
        with contextlib.suppress(OSError):
            self._show(line)

    def _catch_up(self) -> None:
        while self._late:
            self._write(self._late[0])
            self._late.popleft()

    def _write(self, record: Record) -> None:
        if not self._superseded:
            event = self._events.write(record.event, t=record.t, attempt=record.attempt, **record.fields)
            for line in self._narrator.lines(event):
                self._tell(line)

    def _still_ours(self) -> bool:
        if not self._superseded:
            try:
                now = SupervisorAddress.read(self._folder.path)
            except WireError:  # torn or of a newer release: that is not us
                now = None
            if now is not None and now.epoch > self._epoch:
                self._superseded = True
                self._tell(f"supervisor {now.epoch} of this run, in job {now.job_id}, has taken it over: this one ends")
                self._answer(Superseded(now.epoch))
        return not self._superseded
