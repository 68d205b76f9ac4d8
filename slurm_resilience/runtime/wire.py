"""The socket between agent and supervisor: a non-blocking stream of :mod:`messages <slurm_resilience.runtime.messages>`."""

from __future__ import annotations

import socket

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.runtime.messages import MAX_LINE_BYTES, Beat, Garbage, Message, parse

MAX_UNSENT_BYTES = 16 << 20
_READ_AT_ONCE = 4 << 20


class Connection:
    """A non-blocking stream of messages.  No method blocks or raises for what the peer does; ``closed`` says why it ended.

    Put it into a selector for reading, and also for writing while ``wants_write``.  ``last_heard`` is monotonic and moves
    with each good message.  ``seen`` is the highest beat number heard, which the supervisor sends back in its pings.
    """

    def __init__(self, sock: socket.socket, *, clock: Clock = SYSTEM_CLOCK) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.last_heard = clock.monotonic()
        self.seen = 0
        self.closed: str | None = None
        self._clock = clock
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Something is waiting for room in the socket."""
        return bool(self._out) and self.closed is None

    def send(self, message: Message) -> None:
        """Queue a message and send what fits.  Raises :class:`WireError` for one over the limit, and for nothing else."""
        raw = message.to_line()
        if self.closed is None:
            self._out += raw
            self.flush()

    def flush(self) -> None:
        """Send what fits.  A peer that takes nothing for MAX_UNSENT_BYTES is given up."""
        try:
            while self._out and self.closed is None:
                del self._out[: self.socket.send(self._out)]
        except (BlockingIOError, InterruptedError):
            if len(self._out) > MAX_UNSENT_BYTES:
                self.closed = f"the peer left {len(self._out)} bytes unread"
        except OSError as error:
            self.closed = f"send failed: {error.strerror or error}"

    def receive(self) -> list[Message]:
        """All whole messages that have arrived, up to a few MiB at once; what came before an end is still returned."""
        end: str | None = None
        room = _READ_AT_ONCE
        try:
            while room > 0 and end is None:
                data = self.socket.recv(1 << 16)
                if not data:
                    end = "the peer closed the connection"
                self._in += data
                room -= len(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            end = f"receive failed: {error.strerror or error}"
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages: list[Message] = []
        for line in lines:
            message = parse(line) if len(line) < MAX_LINE_BYTES else Garbage(f"a line of {len(line)} bytes")
            messages.append(message)
            if isinstance(message, Garbage):
                continue
            self.last_heard = self._clock.monotonic()
            if isinstance(message, Beat):
                self.seen = max(self.seen, message.n)
        if len(self._in) >= MAX_LINE_BYTES:
            end = f"a line of more than {MAX_LINE_BYTES} bytes"
        if end is not None and self.closed is None:
            self.closed = end
        return messages

    def close(self, why: str = "closed by us") -> None:
        """Give the socket up; queued bytes that did not fit are lost."""
        if self.closed is None:
            self.closed = why
        self.socket.close()
