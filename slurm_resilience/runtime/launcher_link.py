"""One launcher as its agent sees it: a socket with JSON lines, and what it said about itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_resilience.runtime.processes import spawn

LAUNCHER = Path(__file__).with_name("launcher.py")


class LauncherLink:
    """The agent's end.  ``warm`` is None while it preloads; ``pending`` counts forks asked for and not answered yet."""

    def __init__(self, channel: socket.socket, pid: int | None) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._in = b""
        self._out = bytearray()
        self.pids = {pid} if pid is not None else set()
        self.warm: bool | None = None
        self.reason = "it is still importing"
        self.seconds = 0.0
        self.known: set[str] = set()
        self.children: set[int] = set()  # numbers of the ranks and stores that it has forked and not buried
        self.pending = 0

    @classmethod
    def start(cls, command: Sequence[str], *, environment: Mapping[str, str], log: Path, agent: int) -> LauncherLink:
        """Start ``command launcher.py serve`` and return at once; it says by itself when it is warm."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = spawn([*command, str(LAUNCHER), "serve", str(agent)], env=environment, log=log, stdin=theirs.fileno())
        return cls(ours, pid)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def flush(self) -> None:
        """Send what fits; a launcher that is gone shows in :meth:`receive`."""
        try:
            while self._out:
                del self._out[: self._channel.send(self._out)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._out.clear()

    def send(self, **message: Any) -> None:
        """Queue one request."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def preload(self, named: Sequence[str], learned: Sequence[str]) -> None:
        """Have it import these; answered by "warm"."""
        self.known |= {*named, *learned}
        self.send(m="preload", named=list(named), learned=list(learned))

    def renew(self, named: Sequence[str], learned: Sequence[str], *, agent: int) -> LauncherLink | None:
        """Have it fork a successor that preloads more while this one keeps its ranks; None when its socket is full."""
        if self._out:
            return None
        ours, theirs = socket.socketpair()
        line = json.dumps({"m": "renew", "named": list(named), "learned": list(learned), "agent": agent}).encode() + b"\n"
        with theirs:
            try:
                sent = socket.send_fds(self._channel, [line], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        self._out += line[sent:]
        successor = LauncherLink(ours, None)
        successor.known = self.known | {*named, *learned}
        return successor

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the launcher is gone."""
        gone = False
        try:
            while True:
                data = self._channel.recv(1 << 16)
                if not data:
                    gone = True
                    break
                self._in += data
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            gone = True
        *lines, self._in = self._in.split(b"\n")
        return [json.loads(line) for line in lines], gone

    def close(self) -> None:
        """Hang up, on which the launcher and all that it forked end."""
        self._channel.close()
