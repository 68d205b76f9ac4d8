"""The agent's line to the supervisor: found, proven, leased, and kept alive across supervisors.

What must reach the supervisor is kept while there is none, and until a beat that was sent after it has been acknowledged, so
that a supervisor that dies with its mail unread loses nothing.  Bounded; the oldest curve points are the first to go.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.lease import Lease
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import BEAT_EVERY_S, Beat, Fact, Garbage, Hello, Message, Ping, Warm, Welcome, WireError
from slurm_resilience.runtime.wire import Connection

_CONNECT_S = 2.0
_GREETING_S = 5.0
_RETRY_S = (0.1, 1.0)
_MOST_SPOOLED = 1_000
_CURVE = "step_reported"


class Uplink:
    """Connects, greets, beats, and renews the lease.

    ``greet(token, address)`` makes the hello; ``obey(message)`` gets every message after a proven welcome.  ``fenced`` says
    why this agent has no supervisor any more: the run belongs to another job or restart.  ``refused``: at the last try the
    supervisor's machine answered that nobody listens there.
    """

    def __init__(
        self, loop: Loop, run_dir: Path, lease: Lease, *,
        greet: Callable[[str, str], Hello], welcomed: Callable[[], None],
        obey: Callable[[Message], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._run_dir = run_dir
        self._lease = lease
        self._greet, self._welcomed, self._obey, self._say = greet, welcomed, obey, say
        self._connection: Connection | None = None
        self._address: SupervisorAddress | None = None
        self._hosts: list[str] = []
        self._hello: Hello | None = None
        self._socket: socket.socket | None = None
        self._looking = False
        self._deadline = 0.0
        self._greeted_at = 0.0
        self._retry_at = 0.0
        self._back_off_s = _RETRY_S[0]
        self.beat_every_s = BEAT_EVERY_S
        self._beats: dict[int, float] = {}
        self._beat = 0
        self._spool: deque[Message] = deque()
        self._unread: deque[tuple[int, Message]] = deque()  # what was sent, with the number of the beat before it
        self._dropped = 0
        self.fenced: str = ""
        self.up = False
        self.refused = False
        self.welcomes = 0  # connections so far; a supervisor that gives a node up ends the one it had

    # --- speaking -----------------------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Send it, now or when there is a supervisor again; it may arrive twice.

        How warm the launcher is counts at the moment only: that is told anew at each welcome, and never kept.
        """
        if self.up:
            self._send(message)
        if isinstance(message, Warm):
            return
        if self.up:
            self._unread.append((self._beat, message))
            if len(self._unread) > _MOST_SPOOLED:
                self._unread.popleft()
        else:
            self._spool.append(message)
            self._bound_spool()

    def repeat(self, message: Message) -> None:
        """Tell it once more, unless that is on its way already."""
        if all(message != told for _, told in self._unread):
            self.tell(message)

    def beat(self, attempt: int, ranks: dict[str, Any]) -> None:
        """Say that this node lives; never spooled."""
        if self.up:
            self._beat += 1
            self._beats[self._beat] = time.monotonic()
            self._send(Beat(n=self._beat, attempt=attempt, ranks=ranks))

    def _send(self, message: Message) -> None:
        assert self._connection is not None
        try:
            self._connection.send(message)
        except WireError as error:
            self._say(f"cannot tell the supervisor: {error}")

    def _bound_spool(self) -> None:
        """Drop the oldest point of the curve, or the oldest other fact; what was said about processes stays longest."""
        while len(self._spool) > _MOST_SPOOLED:
            facts = [(message.fact != _CURVE, at) for at, message in enumerate(self._spool) if isinstance(message, Fact)]
            del self._spool[min(facts)[1] if facts else 0]
            self._dropped += 1

    # --- the line ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Connect when there is no line, and give up an attempt that takes too long."""
        if self._connection is None and self._socket is None and not self._looking and now >= self._retry_at:
            self._looking = True
            run_dir = self._run_dir
            self._loop.aside(lambda: _read_address(run_dir), self._found, within_s=2.0)
        elif not self.up and now >= self._deadline and (self._socket is not None or self._connection is not None):
            self.drop("no answer")
        elif self._connection is not None and self._connection.closed is not None:
            self.drop(self._connection.closed)

    def drop(self, why: str) -> None:
        """End the line; the next tries start after a back-off."""
        if self._socket is not None:
            self._loop.forget(self._socket)
            self._socket.close()
            self._socket = None
        if self._connection is not None:
            self._loop.forget(self._connection)
            self._connection.close()
            self._connection = None
        if self.up:
            self._say(f"lost the supervisor: {why}")
        self._spool.extendleft(message for _, message in reversed(self._unread))
        self._unread.clear()
        self._bound_spool()
        self.up = False
        self._again()

    def look_again(self) -> None:
        """Another supervisor has announced itself: whatever is under way to the one before is given up."""
        if self._socket is not None or self._connection is not None:
            self.drop("another supervisor is there")
        self._retry_at, self._back_off_s = 0.0, _RETRY_S[0]

    def _again(self) -> None:
        self._retry_at = time.monotonic() + self._back_off_s * random.uniform(0.7, 1.3)  # noqa: S311 -- only spreads the tries
        self._back_off_s = min(self._back_off_s * 2, _RETRY_S[1])

    def _found(self, raw: dict[str, Any] | None) -> None:
        self._looking = False
        if raw is None or "error" in raw:
            if raw is not None:
                self._say(f"no supervisor to be found: {raw['error']}")
            self._again()
            return
        found = SupervisorAddress(**raw)
        before = self._address
        ours = (before.job_id, before.restart_count) if before is not None else _job_of_environment(found)
        if ours != (found.job_id, found.restart_count):
            self.fenced = (
                f"the run belongs to job {found.job_id}, restart {found.restart_count} now; "
                f"this agent came with job {ours[0]}, restart {ours[1]}"
            )
            return
        if before is not None and found.epoch < before.epoch:
            self._again()  # an older supervisor has written its address late; the newer one puts its own back
            return
        if before is None or before.epoch != found.epoch:
            self._hosts = []
        self._address = found
        if not self._hosts:
            self._hosts = [found.host, *found.others]
        self._dial(self._hosts.pop(0), found.port)

    def _dial(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        code = sock.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            self.refused = code == errno.ECONNREFUSED
            sock.close()
            self._again()
            return
        self._socket = sock
        self._deadline = time.monotonic() + _CONNECT_S
        self._loop.watch_writable(sock, self._dialled)

    def _dialled(self) -> None:
        """Called when the socket can be written to: it is connected, or never will be."""
        sock = self._socket
        assert sock is not None
        assert self._address is not None
        self._loop.forget(sock)
        self._socket = None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.refused = code == errno.ECONNREFUSED
        if code != 0:
            sock.close()
            self._again()
            return
        self._connection = Connection(sock)
        self._loop.watch(self._connection, self._hear)
        self._hello = self._greet(self._address.token, sock.getsockname()[0].removeprefix("::ffff:"))
        self._greeted_at = time.monotonic()
        self._deadline = self._greeted_at + _GREETING_S
        self._send(self._hello)

    def _hear(self) -> None:
        connection = self._connection
        assert connection is not None
        for message in connection.receive():
            if self._connection is not connection:
                return  # an earlier message of this batch made us drop the line
            if isinstance(message, Garbage):
                self._say(f"the supervisor sent garbage: {message.why}")
            elif not self.up:
                self._check_welcome(message)
            elif isinstance(message, Ping):
                self._renew_lease(message.seen)
            else:
                self._obey(message)
        if connection.closed is not None and self._connection is connection:
            self.drop(connection.closed)

    def _check_welcome(self, message: Message) -> None:
        assert self._hello is not None
        assert self._address is not None
        if not isinstance(message, Welcome) or not message.proves(self._address.token, self._hello):
            self._say("whoever listens at the supervisor's address does not know its token; not obeyed")
            self.drop("no proof")
            return
        self.up = True
        self.beat_every_s = max(BEAT_EVERY_S, message.beat_every_s)
        self.welcomes += 1
        self._back_off_s = _RETRY_S[0]
        self._beats.clear()
        self._lease.renew(self._greeted_at)
        self._say(f"in touch with the supervisor at {self._address.host}:{self._address.port}, epoch {self._address.epoch}")
        kept, self._spool = self._spool, deque()
        for message in kept:
            self.tell(message)
        self._welcomed()
        if self._dropped:
            self._say(f"{self._dropped} facts were dropped while there was no supervisor")
            self._dropped = 0

    def _renew_lease(self, seen: int) -> None:
        """The lease runs from the moment when the beat was sent that the supervisor says it has heard."""
        sent = self._beats.get(seen)
        if sent is not None:
            self._lease.renew(sent)
            self._beats = {n: at for n, at in self._beats.items() if n >= seen}
            while self._unread and self._unread[0][0] < seen:
                self._unread.popleft()

    @property
    def job(self) -> tuple[str, int]:
        """Job id and restart count of the supervisor that this agent belongs to; ("", 0) before the first."""
        return (self._address.job_id, self._address.restart_count) if self._address is not None else ("", 0)


def _job_of_environment(found: SupervisorAddress) -> tuple[str, int]:
    """Job and restart that Slurm started this agent for; those of the supervisor where Slurm did not, or does not say."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id or not found.job_id.isdigit():
        return found.job_id, found.restart_count
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")  # Slurm sets it from the first restart on
    return job_id, int(restart) if restart.isdigit() else found.restart_count


def _read_address(run_dir: Path) -> dict[str, Any] | None:
    """Done aside, since the run folder may hang."""
    try:
        found = SupervisorAddress.read(run_dir)
    except (WireError, OSError) as error:
        return {"error": str(error)}
    return dataclasses.asdict(found) if found is not None else None
