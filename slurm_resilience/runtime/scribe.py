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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.observe.json_lines import JsonNarrator
from slurm_resilience.observe.narrator import Narrator
from slurm_resilience.runtime import epochs, forgiveness
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.inputs import (
    AttemptWritten,
    Forgiven,
    Input,
    Record,
    Superseded,
    WriteAttempt,
    WriteIncident,
    WriteLive,
    WriteStatus,
)
from slurm_resilience.runtime.messages import WireError
from slurm_resilience.runtime.run_folder import RunFolder

_CHECK_EVERY_S = epochs.PULSE_EVERY_S
_SAY_EVERY_S = 60.0
_RETRY_S = 1.0
_WELL_AGAIN_S = 3.0
"""Events go into a file that is open, and are written also where nothing new can be: well after no failure for this long.  The
pulse and the live document are tried each second."""
_MOST_WAITING = 100_000


@dataclass(frozen=True)
class _Flush:
    done: threading.Event


class Scribe(threading.Thread):
    """Takes outputs in order and does them in order.

    ``address`` is ours: before an attempt number is written, and each second, it makes sure that no other supervisor has
    claimed a newer epoch, and answers ``Superseded`` when one has.  ``answer`` and ``show`` are called from this thread.
    Events that cannot be written wait, in order, until they can be.  The pulse is given from here, too.  ``narrator`` makes the
    lines; ``watch`` is called with each event that was written, and returns at once.
    """

    def __init__(
        self,
        folder: RunFolder,
        events: EventWriter,
        *,
        address: SupervisorAddress,
        answer: Callable[[Input], None],
        show: Callable[[str], None],
        narrator: Narrator | JsonNarrator | None = None,
        watch: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        super().__init__(name="scribe", daemon=True)
        self._folder, self._events, self._address = folder, events, address
        self._answer, self._show = answer, show
        self._narrator = narrator or Narrator()
        self._watch = watch
        self._narrator.catch_up(read_events(folder.path))
        self._todo: queue.SimpleQueue[Record | WriteAttempt | WriteStatus | WriteLive | WriteIncident | _Flush | str] = (
            queue.SimpleQueue()
        )
        self._late: deque[Record] = deque(maxlen=_MOST_WAITING)
        self._late_status: WriteStatus | None = None
        self._superseded = False
        self._beats = 0
        self._unwritten = 0
        self._failed_at = float("-inf")
        self._said_at = float("-inf")

    def put(self, output: Record | WriteAttempt | WriteStatus | WriteLive | WriteIncident) -> None:
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
        checked = float("-inf")
        while True:
            try:
                output = self._todo.get(timeout=_RETRY_S)
            except queue.Empty:
                output = None
            try:
                if time.monotonic() - checked >= _CHECK_EVERY_S:
                    checked = time.monotonic()
                    if self._still_ours():
                        self._beats += 1
                        epochs.beat(self._folder.path, self._address.epoch, self._beats)
                        for node in forgiveness.heard(self._folder.path):
                            self._answer(Forgiven(node))
                self._catch_up()
                if output is not None:
                    self._do(output)
                self._can_write_again()
            except OSError as error:
                self._cannot_write(error)
                if isinstance(output, Record):
                    self._late.append(output)
                elif isinstance(output, WriteStatus):  # the newest is all that counts, and an older one must not come after it
                    self._late_status = output
                elif output is not None and not isinstance(output, WriteLive):
                    time.sleep(_RETRY_S)
                    self._todo.put(output)

    def _do(self, output: Record | WriteAttempt | WriteStatus | WriteLive | WriteIncident | _Flush | str) -> None:
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
                self._late_status = None
            case WriteLive(document):
                if not self._superseded:
                    self._folder.write_live(document)
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
        if self._late_status is not None:
            try:
                self._do(self._late_status)
            except OSError as error:  # what comes next may be for a file that can be written
                self._cannot_write(error)

    def _write(self, record: Record) -> None:
        if not self._superseded:
            event = self._events.write(record.event, t=record.t, attempt=record.attempt, **record.fields)
            for line in self._narrator.lines(event):
                self._tell(line)
            self._watch(event)

    def _cannot_write(self, error: OSError) -> None:
        """Say it once, and now and then how often: a full disk fails each event."""
        self._unwritten += 1
        now = self._failed_at = time.monotonic()
        if now - self._said_at > _SAY_EVERY_S:
            times = f" ({self._unwritten} times so far)" if self._unwritten > 1 else ""
            self._tell(f"cannot write into {self._folder.path}: {error}; going on, and trying again{times}")
            self._said_at = now

    def _can_write_again(self) -> None:
        if self._unwritten and not self._late and time.monotonic() - self._failed_at >= _WELL_AGAIN_S:
            self._tell(f"{self._folder.path} can be written again, after {self._unwritten} failures")
            self._unwritten, self._said_at = 0, float("-inf")

    def _still_ours(self) -> bool:
        """No newer epoch is claimed.  Our address is put back where an older supervisor wrote its own over it late."""
        if self._superseded:
            return False
        newest = epochs.newest(self._folder.path)
        try:
            published = SupervisorAddress.read(self._folder.path)
        except WireError:  # torn: it says nothing
            published = None
        newest = max(newest, published.epoch if published is not None else 0)
        if newest > self._address.epoch:
            self._superseded = True
            self._tell(f"supervisor {newest} of this run has taken it over: this one, {self._address.epoch}, steps back")
            self._answer(Superseded(newest))
        elif published is None or published.epoch < self._address.epoch:
            self._address.write(self._folder.path)
        return not self._superseded
