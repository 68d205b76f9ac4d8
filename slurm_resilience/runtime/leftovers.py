"""What did an earlier agent of this run leave on this node?  Nothing, once this was called."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

from slurm_resilience.errors import LaunchError
from slurm_resilience.runtime.processes import carrying, look, send_signal


def clear_leftovers(identity: Mapping[str, str], *, say: Callable[[str], None], patience_s: float = 10.0) -> None:
    """Kill all that was started with these variables, except this process and those above it, and wait for the proof.

    Raises :class:`LaunchError` when something will not die.
    """
    ours = set()
    above = look(os.getpid())
    while above is not None and above.pid > 0:
        ours.add(above.pid)
        above = look(above.parent)
    deadline = time.monotonic() + patience_s
    while left := [process for process in carrying(identity) if process.pid not in ours]:
        for process in left:
            say(f"killing process {process.pid}, left by an earlier agent")
            send_signal(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LaunchError(
                "Processes of an earlier agent of this run are alive on this node and cannot be killed",
                evidence=", ".join(f"{process.pid} in state {process.state}" for process in left),
                remedy="state D waits for a device or a file system: leave this node out",
            )
        time.sleep(0.02)
