"""To whom does a rank report, and who tells it what to do: its agent, or, without one, nobody but its own folder.

Without an agent (plain ``python train.py``, plain torchrun) rank 0 writes the facts into the run's event file itself, so that
the same commands can read the run; orders then come from signals.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from slurm_resilience._atomic import read_json, write_atomic, write_json_atomic
from slurm_resilience.errors import FormatError
from slurm_resilience.observe.events import EventWriter
from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.facts import MAX_BYTES, FactSender
from slurm_resilience.progress.page import Orders, PageWriter, Phase

MOST_UNTOLD = 200
LONGEST_WAIT_S = 30.0
log = logging.getLogger(__name__)
NO_ORDERS = Orders(stop=False, save=0, deadline=None, cause="")


class Link(Protocol):
    """The rank's ties to whoever looks after it."""

    def beat(self, step: int) -> None:
        """Alive, with so many completed steps."""
        ...

    def enter(self, phase: Phase) -> Phase:
        """Busy with something else from now on; returns with what before."""
        ...

    def push(self, name: str, phase: Phase, limit_s: float) -> None:
        """A section begins inside of that; see :class:`progress.sections.Sections`."""
        ...

    def pop(self) -> None:
        """The innermost section ends."""
        ...

    def own(self, seconds: float) -> None:
        """What a step cost this rank before it had to meet the others."""
        ...

    def orders(self) -> Orders:
        """What is asked for now."""
        ...

    def send(self, kind: str, **fields: Any) -> bool:
        """One fact, from any thread.  False when nobody heard it."""
        ...

    def done(self) -> None:
        """The process will end on purpose."""
        ...


class AgentLink:
    """A page in shared memory and a datagram socket.

    An agent that does not listen for a while (its queue holds about ten facts) costs one second now and then, not one for
    each fact: what it could not be told is told later, except the thinned-out steps, which metrics.jsonl has anyway.
    """

    def __init__(self, contract: RankContract, rank: int) -> None:
        self._page = PageWriter(contract.page)
        self._facts = FactSender(contract.facts, attempt=contract.attempt, rank=rank)
        self._untold: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_UNTOLD)
        self._wait_s = 0.0
        self._not_before_s = 0.0
        self._telling = threading.RLock()
        self.beat = self._page.beat
        self.enter = self._page.enter
        self.push, self.pop = self._page.push, self._page.pop
        self.own = self._page.own
        self.orders = self._page.orders

    def send(self, kind: str, **fields: Any) -> bool:
        with self._telling:
            if kind != "step_reported" or not self._untold:
                self._untold.append((kind, fields))
            return time.monotonic() >= self._not_before_s and self._tell()

    def done(self) -> None:
        """Say so on the page, after a last try to tell what is left; and, at the end of the program, that it has come to it."""
        with self._telling:
            self._tell()
        self._page.done()
        # What goes wrong after that, in the teardown of a library, is no failure of the training.
        atexit.register(self.send, "script_ended")

    def _tell(self) -> bool:
        while self._untold:
            kind, fields = self._untold[0]
            try:
                heard = self._facts.send(kind, **fields)
            except ValueError:
                heard = self._facts.send(kind, **_shortened(fields))
            if not heard:
                self._wait_s = min(max(1.0, 2 * self._wait_s), LONGEST_WAIT_S)
                self._not_before_s = time.monotonic() + self._wait_s
                return False
            self._untold.popleft()
        self._wait_s = 0.0
        return True


class LocalLink:
    """Events of rank 0 in the run's folder; the facts of the other ranks are heard by nobody, and said to be so."""

    def __init__(self) -> None:
        self._phase = Phase.INIT
        self._events: EventWriter | None = None
        self._writing = threading.RLock()

    def open(self, run_dir: Path, *, attempt: int, world: int) -> None:
        """Begin the record of this attempt.  Only rank 0 calls it."""
        self._events = EventWriter(run_dir, restart=0)
        self._events.attempt = attempt
        self._events.write("attempt_started", nodes=[socket.gethostname()], world=world, plan={}, agent=False)

    def beat(self, step: int) -> None:
        pass

    def enter(self, phase: Phase) -> Phase:
        before, self._phase = self._phase, phase
        return before

    def push(self, name: str, phase: Phase, limit_s: float) -> None:
        pass

    def pop(self) -> None:
        pass

    def own(self, seconds: float) -> None:
        pass

    def orders(self) -> Orders:
        return NO_ORDERS

    def send(self, kind: str, **fields: Any) -> bool:
        if self._events is None:
            return False
        with self._writing:
            try:
                self._events.write(kind, rank=0, **fields)
                if kind == "finished":
                    self._events.write("run_completed", step=fields.get("step"))
            except OSError as error:
                log.warning("%s was not written to the event file: %s", kind, error)
                return False
        return True

    def done(self) -> None:
        pass


def _shortened(fields: dict[str, Any]) -> dict[str, Any]:
    most = MAX_BYTES // (4 * max(1, len(fields)))
    return {name: value[-most:] if isinstance(value, str) else value for name, value in fields.items()}


def claim_attempt(run_dir: Path) -> int:
    """The next attempt number of a run without a supervisor, taken under a lock and durable before it returns.

    Raises :class:`FormatError` when the number of the last one cannot be read.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "attempt"
    fd = os.open(run_dir / ".attempt.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            number = int(path.read_text(encoding="ascii")) + 1 if path.exists() else 1
        except ValueError as error:
            raise FormatError(
                f"{path} does not hold an attempt number",
                evidence=str(error),
                remedy="write a number above that of every attempt of this run into it",
            ) from error
        write_atomic(path, f"{number}\n")
        return number
    finally:
        os.close(fd)


def describe_run(run_dir: Path, settings: dict[str, Any]) -> str:
    """Write ``run.json`` for a run without a supervisor, unless there is one, and return the run's id."""
    path = run_dir / "run.json"
    present = read_json(path)
    if isinstance(present, dict) and present.get("run_id"):
        return str(present["run_id"])
    run_id = f"local-{os.urandom(4).hex()}"
    config = {name: value for name, value in settings.items() if value is not None}
    write_json_atomic(path, {"v": 1, "run_id": run_id, "created": time.time(), "argv": sys.argv, "config": config})
    return run_id
