"""Pretend nodes on this machine: agents as children of the supervisor, n1 to nN."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from slurm_resilience.runtime.backend import Ended, last_words
from slurm_resilience.runtime.run_folder import RunFolder


class LocalBackend:
    """``count`` agents on this machine.  They are in sessions of their own and outlive the supervisor, as on a cluster."""

    def __init__(self, folder: RunFolder, count: int) -> None:
        self._folder = folder
        self._names = tuple(f"n{number}" for number in range(1, count + 1))
        self._children: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._names

    def start(self, node: str) -> None:
        self._kill(node)
        log = self._folder.start_log(node)
        command = [sys.executable, "-m", "slurm_resilience.runtime.agent", "--run-dir", str(self._folder.path), "--node", node]
        with open(log, "ab") as file:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=os.environ.copy()
            )
            self._children[node] = (child, file.tell())

    def settled(self, node: str) -> None:
        """Nothing to do: the agent is the child itself."""

    def poll(self) -> list[Ended]:
        ended = []
        for node, (child, start) in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[node]
                ended.append(Ended(node, code, last_words(self._folder.start_log(node), start)))
        return ended

    def close(self) -> None:
        for node in list(self._children):
            self._kill(node)

    def _kill(self, node: str) -> None:
        child, _ = self._children.pop(node, (None, 0))
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
