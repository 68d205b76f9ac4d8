"""How is a child ended that lets Slurm's signals pass?

Slurm sends its warnings to every process of a step.  A loader's worker, or a pool's, that died of them would take the rank
along before it has saved, so they let SIGTERM pass; but it is also how ``multiprocessing`` ends its children: ``terminate()``,
a pool that is left, and at the end of the interpreter all daemons, for which it then waits without limit.  A handler in Python
does not learn who sent a signal.  So ``terminate()`` sends a second one, which only a parent sends, to children that wait for
it.
Source: multiprocessing/util.py, _exit_function; multiprocessing/popen_fork.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing import popen_fork
from types import FrameType
from typing import Any

END = signal.SIGRTMAX - 5


def make_terminate_work() -> None:
    """From now on ``terminate()`` of multiprocessing also ends children that let SIGTERM pass.

    It stays when the run is over: children that were made before live on.  There is no public place for it.
    """
    before: Any = popen_fork.Popen.terminate
    if getattr(before, "_ends_children", False):
        return

    def terminate(self: Any) -> None:
        before(self)
        if self.returncode is None and _waits_for_end(self.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, END)

    terminate._ends_children = True  # type: ignore[attr-defined]
    popen_fork.Popen.terminate = terminate  # type: ignore[method-assign]


def _waits_for_end(pid: int) -> bool:
    """Whether a process has a handler for END; to others it would be deadly, whatever they do about SIGTERM.

    Source: proc_pid_status(5), SigCgt.
    """
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (END - 1) & 1)
    except (OSError, StopIteration, ValueError, IndexError):
        return False


def end_worker(number: int, frame: FrameType | None) -> None:
    """In a loader's worker: torch takes any other end of it for a failure.  Source: torch/csrc/DataLoader.cpp."""
    os._exit(0)


def end_by_sigterm() -> None:
    """In a child of another kind: end as it would have without us."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
