"""The supervisor: sockets, signals, threads and files around the :mod:`coordinator`, which does all the thinking.

One loop that never blocks: files are the scribe's, Slurm is the errands'.  The coordinator names the exit code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_resilience._clock import SYSTEM_CLOCK, boot_id
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.observe.json_lines import JsonNarrator
from slurm_resilience.runtime import epochs
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.backend import Backend
from slurm_resilience.runtime.coordinator import Coordinator
from slurm_resilience.runtime.descriptors import make_room
from slurm_resilience.runtime.errands import Errands
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.messages import BEAT_EVERY_S, WIRE_VERSION, Beat, Garbage, Hello, Ping, Quit, Welcome, WireError
from slurm_resilience.runtime.processes import myself
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.scribe import Scribe
from slurm_resilience.runtime.spec import RunSpec, Takeover
from slurm_resilience.runtime.wire import Connection

if TYPE_CHECKING:
    from slurm_resilience.observe.telemetry import Telemetry

_TICK_S = 0.1
_HELLO_S = 10.0
_FLUSH_S = 10.0
# Connections whose first word is awaited: so many besides one for each node, which may all dial in the same second.
_MOST_STRANGERS = 1000
_MOST_AT_ONCE = 256
_BACKLOG = 4096  # the kernel's own default limit; who does not fit in tries again after a second, and then after two
# So many beats a second leave room on one core for everything else; fewer nodes beat as often as they like.
_BEATS_PER_S = 10_000
_WARNINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass
class _Guest:
    """One connection.  ``greeted``: it has proved that it knows the token.  ``pinged``: when a beat was last answered."""

    number: int
    connection: Connection
    since: float
    greeted: bool = False
    node: str = ""
    pinged: float = float("-inf")


class Supervisor:
    """Keeps one run alive inside one allocation.

    ``host``: the numeric address at which the nodes reach this process.  ``restarted``: another supervisor of this
    allocation died, and its agents may be alive.  ``takeover``: it died with its node, and we are on another one, with an
    ``epoch`` that an agent has claimed for us.  ``superseded``: another supervisor has taken the run over from us.
    """

    def __init__(
        self,
        folder: RunFolder,
        run_id: str,
        config: ResilienceConfig,
        spec: RunSpec,
        backend: Backend,
        *,
        host: str,
        node: str = "",
        errands: Callable[[Callable[[i.Input], None]], Errands] | None,
        restarted: bool,
        show: Callable[[str], None],
        epoch: int | None = None,
        takeover: Takeover | None = None,
    ) -> None:
        self.superseded = False
        self._backend = backend
        # An agent's patience holds two lost beats.
        slowest = max(BEAT_EVERY_S, min(1.0, config.limits.agent_silence_s / 2.5))
        self._beat_every_s = min(slowest, max(BEAT_EVERY_S, len(backend.nodes) / _BEATS_PER_S))
        self._selector = selectors.DefaultSelector()
        self._inbox: deque[i.Input] = deque()
        self._wakeup, self._wake = socket.socketpair()
        self._guests: dict[int, _Guest] = {}
        self._strangers: dict[int, _Guest] = {}
        self._numbers = 0
        self._look_at = 0.0
        self._signals: deque[tuple[int, float]] = deque()
        self._catch_signals()
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        before = SupervisorAddress.read(folder.path)
        history = History.replay(read_events(folder.path))
        self._token = secrets.token_hex(32)
        if epoch is None:
            epoch = epochs.claim_next(folder.path, node or socket.gethostname(), after=before.epoch if before else 0)
        events = EventWriter(folder.path, restart=spec.restart)
        address = SupervisorAddress(
            epoch=epoch, host=host, port=self._listener.getsockname()[1], token=self._token, pid=os.getpid(), boot_id=boot_id(),
            job_id=spec.job_id, restart_count=spec.restart, node=node, started=myself().started,
        )  # fmt: skip
        self._telemetry = self._watcher(folder, run_id, spec, config, show)
        self._scribe = Scribe(
            folder, events, address=address, answer=self._answer, show=show,
            narrator=JsonNarrator(run_id=run_id, job_id=spec.job_id) if config.observe.log_format == "json" else None,
            watch=self._telemetry.take if self._telemetry is not None else lambda _: None,
        )  # fmt: skip
        self._errands = errands(self._answer) if errands is not None else None
        self._coordinator = Coordinator(
            spec,
            config,
            backend.nodes,
            clock=SYSTEM_CLOCK,
            history=history,
            attempt=folder.attempt(),
            restarted=restarted,
            takeover=takeover,
        )
        if before is None:
            first = i.Record("run_started", {"run_id": run_id, "argv": list(spec.argv)}, time.time(), 0)
            self._scribe.put(first)
        address.write(folder.path)

    @staticmethod
    def _watcher(
        folder: RunFolder, run_id: str, spec: RunSpec, config: ResilienceConfig, show: Callable[[str], None]
    ) -> Telemetry | None:
        """Who tells others, where that was asked for."""
        if not config.observe.active:
            return None
        from slurm_resilience.observe.telemetry import Telemetry

        made = Telemetry(folder.path, run_id, spec.job_id, config.observe, show)
        made.start()
        return made

    def run(self) -> int:
        """Until the run is complete, moved or given up; the exit code."""
        self._scribe.start()
        cramped = make_room(len(self._backend.nodes))
        if cramped:
            self._scribe.say(cramped)
        if self._errands is not None:
            self._errands.start()
        code: int | None = self._do(self._coordinator.start())
        ping_at = 0.0
        while code is None:
            self._inputs_of_one_turn()
            code = self._do(self._coordinator.handle(i.Tick()))
            while code is None and self._inbox:
                code = self._do(self._coordinator.handle(self._inbox.popleft()))
            if code is None:
                code = self._do(self._coordinator.handle(i.Tick()))
            if time.monotonic() >= ping_at:
                now = time.monotonic()
                ping_at = now + BEAT_EVERY_S
                for guest in list(self._guests.values()):
                    # Who beats has had an answer to that.
                    if guest.greeted and now - guest.pinged > 2 * self._beat_every_s:
                        self._send(guest, Ping(guest.connection.seen))
        self._leave()
        return code

    # --- one turn -----------------------------------------------------------------------------------------------------

    def _inputs_of_one_turn(self) -> None:
        """Wait for something, at most until the next tick, and put what came into the inbox."""
        for key, events in self._selector.select(_TICK_S):
            if isinstance(key.data, _Guest):
                if events & selectors.EVENT_WRITE:
                    key.data.connection.flush()
                    self._watch(key.data)
                if events & selectors.EVENT_READ:
                    self._hear(key.data)
            else:
                key.data()
        while self._signals:
            number, t = self._signals.popleft()
            self._inbox.append(i.Signalled(signal.Signals(number).name, t))
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _TICK_S / 2
        for ended in self._backend.poll():
            self._inbox.append(i.CarrierEnded(ended.node, ended.code, ended.tail))
        for guest in [guest for guest in self._strangers.values() if now - guest.since > _HELLO_S]:
            self._part(guest, "it did not say hello")

    def _answer(self, result: i.Input) -> None:
        """From another thread: hand a result to the loop."""
        self.superseded = self.superseded or isinstance(result, i.Superseded)
        self._inbox.append(result)
        with contextlib.suppress(BlockingIOError):  # full: the loop is awake already
            self._wake.send(b"\0")

    def _catch_signals(self) -> None:
        """A handler notes the signal and its time, nothing else; the wake-up byte ends the wait of the loop."""
        self._wakeup.setblocking(False)
        self._wake.setblocking(False)
        for number in _WARNINGS:
            signal.signal(number, lambda got, _: self._signals.append((got, time.time())))
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: self._wakeup.recv(4096))

    # --- agents -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Whoever waits at the door, many at once: a turn of the loop for each would take thousands of agents minutes."""
        for _ in range(_MOST_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            if len(self._strangers) >= _MOST_STRANGERS + len(self._backend.nodes):
                sock.close()
                return
            self._numbers += 1
            guest = _Guest(self._numbers, Connection(sock), time.monotonic())
            self._guests[guest.number] = self._strangers[guest.number] = guest
            self._selector.register(guest.connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        connection = guest.connection
        for message in connection.receive():
            if guest.number not in self._guests:
                return
            if not guest.greeted:
                if not isinstance(message, Hello) or message.v > WIRE_VERSION or not message.proves(self._token):
                    self._part(guest, "it does not know the token")
                    return
                guest.greeted, guest.node = True, message.node
                del self._strangers[guest.number]
                self._send(guest, Welcome.build(self._token, message, beat_every_s=self._beat_every_s))
                self._inbox.append(i.Joined(guest.number, message))
                self._backend.settled(message.node)
            elif isinstance(message, Garbage):
                self._scribe.say(f"{guest.node} sent something that is no message: {message.why}")
            else:
                if isinstance(message, Beat):
                    guest.pinged = time.monotonic()
                    self._send(guest, Ping(connection.seen))
                self._inbox.append(i.Heard(guest.number, message))
        if connection.closed is not None:
            self._part(guest, connection.closed)

    def _send(self, guest: _Guest, message: Any) -> None:
        try:
            guest.connection.send(message)
        except WireError as error:
            self._scribe.say(f"cannot tell {guest.node}: {error}")
        self._watch(guest)

    def _watch(self, guest: _Guest) -> None:
        if guest.number in self._guests:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.connection.wants_write else 0)
            if self._selector.get_key(guest.connection).events != events:
                self._selector.modify(guest.connection, events, guest)

    def _part(self, guest: _Guest, why: str) -> None:
        if self._guests.pop(guest.number, None) is not None:
            self._strangers.pop(guest.number, None)
            self._selector.unregister(guest.connection)
            guest.connection.close(why)
            if guest.greeted:
                self._inbox.append(i.Parted(guest.number, why))

    # --- doing --------------------------------------------------------------------------------------------------------

    def _do(self, outputs: list[i.Output]) -> int | None:
        """Do what the coordinator wants, in its order; the exit code when that is the end."""
        for output in outputs:
            match output:
                case i.Send(number, message):
                    if number in self._guests:
                        self._send(self._guests[number], message)
                case i.Drop(number, why):
                    guest = self._guests.get(number)
                    if guest is not None:
                        if output.quit:
                            self._send(guest, Quit(why))
                        self._part(guest, why)
                case i.Record() | i.WriteAttempt() | i.WriteStatus() | i.WriteLive() | i.WriteIncident():
                    self._scribe.put(output)
                case i.StartAgent(node):
                    self._backend.start(node)
                case i.AskSlurm() | i.LookAtNodes() | i.Requeue():
                    assert self._errands is not None
                    self._errands.put(output)
                case i.Finish(code):
                    return code
        return None

    def _leave(self) -> None:
        if not self._scribe.flush(within_s=_FLUSH_S):
            self._scribe.say(f"the last events could not be written in {_FLUSH_S:g} s")
        self._backend.close()
        if self._telemetry is not None:
            self._telemetry.leave()
        for guest in list(self._guests.values()):
            self._part(guest, "the supervisor ends")
        self._listener.close()
