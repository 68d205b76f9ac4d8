"""One loop that never waits for anything but its next deadline: streams, and work that may block done aside."""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_resilience.runtime.processes import close_others

_MOST_BYTES = 4 << 20


class Stream(Protocol):
    """What the loop watches: for reading always, for writing while it wants to."""

    def fileno(self) -> int: ...

    @property
    def wants_write(self) -> bool: ...

    def flush(self) -> None: ...


@dataclass
class _Work:
    pid: int
    deadline: float
    then: Callable[[Any], None]
    answer: bytes = b""


class Loop:
    """A selector with callbacks.  A callback is called with nothing to be read, too: it must not block."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, Stream] = {}
        self._work: dict[int, _Work] = {}

    def watch(self, source: Any, ready: Callable[[], None]) -> None:
        """Call ``ready`` when ``source`` can be read; flush it when it wants to write and can."""
        fd = source.fileno()
        self._selector.register(fd, selectors.EVENT_READ, ready)
        if hasattr(source, "wants_write"):
            self._streams[fd] = source

    def watch_writable(self, source: Any, ready: Callable[[], None]) -> None:
        """Call ``ready`` when ``source`` can be written to: a connecting socket is connected then, or never will be."""
        self._selector.register(source.fileno(), selectors.EVENT_WRITE, ready)

    def forget(self, source: Any) -> None:
        """Stop watching; call it before the source is closed."""
        fd = source.fileno()
        self._selector.unregister(fd)
        self._streams.pop(fd, None)

    def turn(self, timeout_s: float) -> None:
        """Wait for something, at most so long, and call who it concerns."""
        for fd, stream in self._streams.items():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.wants_write else 0)
            key = self._selector.get_key(fd)
            if key.events != wanted:
                self._selector.modify(fd, wanted, key.data)
        for key, events in self._selector.select(max(0.0, timeout_s)):
            watched = self._streams.get(key.fd)
            if watched is not None and events & selectors.EVENT_WRITE:
                watched.flush()
                if not events & selectors.EVENT_READ:
                    continue
            # An earlier callback of this turn may have forgotten this source, or put another in its place.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        for fd in [fd for fd, work in self._work.items() if work.deadline <= now]:
            self._finish(fd)

    # --- work that may block --------------------------------------------------------------------------------------------

    def aside(self, work: Callable[[], Any], then: Callable[[Any], None], *, within_s: float) -> None:
        """Do ``work`` in a child and hand its JSON value to ``then``: None when it failed or took too long.

        For reads from a shared file system, which may hang for minutes where this process may not.
        """
        read, write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                close_others([write])
                os.write(write, json.dumps(work()).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.set_blocking(read, False)
        self._work[read] = _Work(pid, time.monotonic() + within_s, then)
        self._selector.register(read, selectors.EVENT_READ, lambda: self._collect(read))

    def helpers(self) -> Iterator[int]:
        """Children that do work aside, and so are no processes of the user."""
        return (work.pid for work in self._work.values())

    def _collect(self, fd: int) -> None:
        work = self._work[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        work.answer += data
        if not data or len(work.answer) > _MOST_BYTES:
            self._finish(fd)

    def _finish(self, fd: int) -> None:
        work = self._work.pop(fd)
        self._selector.unregister(fd)
        os.close(fd)
        try:
            value = json.loads(work.answer)
        except ValueError:
            value = None
            os.kill(work.pid, signal.SIGKILL)
        work.then(value)
