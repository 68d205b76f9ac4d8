"""Facts on their way from a rank to its agent: one JSON object a datagram, no answer awaited."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

MAX_BYTES = 60_000


class FactSender:
    """The rank's end.  A fact is rare; it may wait up to a second for room, and is never silently half-sent."""

    def __init__(self, path: str | os.PathLike[str], *, attempt: int, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(1.0)
        self._path = os.fspath(path)
        self._who = {"attempt": attempt, "rank": rank}

    def send(self, kind: str, **fields: Any) -> bool:
        """Tell the agent one fact; False when it is gone or stays full (the caller's run goes on either way)."""
        raw = json.dumps({"kind": kind, **self._who, "fields": fields}, allow_nan=True).encode()
        if len(raw) > MAX_BYTES:
            raise ValueError(f"a fact of {len(raw)} bytes is over the limit of {MAX_BYTES}: send a path instead")
        try:
            self._socket.sendto(raw, self._path)
        except OSError:
            return False
        return True


class FactReceiver:
    """The agent's end: a non-blocking socket to put into its selector."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        old = os.umask(0o177)
        try:
            self._socket.bind(os.fspath(path))
        finally:
            os.umask(old)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """All facts that have arrived; what is not one JSON object with a kind is reported as kind "garbage"."""
        facts: list[dict[str, Any]] = []
        while True:
            try:
                raw = self._socket.recv(MAX_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return facts
            try:
                fact = json.loads(raw)
                if not isinstance(fact, dict) or not isinstance(fact.get("kind"), str):
                    raise ValueError("not a fact")
            except ValueError:
                fact = {"kind": "garbage", "fields": {"bytes": len(raw)}}
            facts.append(fact)

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
