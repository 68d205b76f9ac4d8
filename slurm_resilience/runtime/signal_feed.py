"""Signals as something to read: handlers only set a flag, the loop decides."""

from __future__ import annotations

import signal
import socket

from slurm_resilience.runtime.processes import WARNING_SIGNALS


class SignalFeed:
    """Takes TERM, USR1, USR2, CHLD and HUP of this process; watch it, and read which came.  INT is ignored."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        for number in (*WARNING_SIGNALS, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read.fileno()

    def warnings(self) -> list[str]:
        """Names of the warning signals that came since the last look; the same one twice counts once."""
        return [signal.Signals(number).name for number in sorted(set(self._read.recv(4096))) if number in WARNING_SIGNALS]
