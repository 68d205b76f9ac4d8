"""Which signals has this process been sent?  Handlers set a flag and do nothing else.

A signal arrives between any two bytecodes, also inside a save, a collective or a write to a log: whatever a
handler did there could deadlock or tear it.  DCP turns an exception from a handler into a failure of all ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from slurm_resilience.training.children import END, end_by_sigterm, end_worker, make_terminate_work

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class SignalFlags:
    """Remembers TERM, USR1 and USR2 of this very process; children that inherit the handlers ignore them.

    What ``terminate()`` of multiprocessing sends still ends them (:mod:`children`).
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}
        self._ended = False
        self._unprotect: Callable[[], None] | None = None

    def install(self) -> bool:
        """Take the handlers over, and protect loaders' workers.  False outside the main thread: Python allows no handlers."""
        self._unprotect = protect_forked_workers()
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in WATCHED:
            self._before[number] = signal.signal(number, self._note)
        self._before[END] = signal.signal(END, self._end_child)
        make_terminate_work()
        return True

    def restore(self) -> None:
        """Put back the handlers that were there before; what somebody installed since then stays.

        Runs of one process may end in any order: a handler of one that has ended is not put back, but the one before it.
        """
        if self._unprotect is not None:
            self._unprotect()
            self._unprotect = None
        self._ended = True
        for number in self._before:
            handler = self._handler_before(number)
            if signal.getsignal(number) in (self._note, self._end_child) and handler is not None:
                signal.signal(number, handler)

    def _handler_before(self, number: int) -> Any:
        handler = self._before.get(number)
        owner = getattr(handler, "__self__", None)
        return owner._handler_before(number) if isinstance(owner, SignalFlags) and owner._ended else handler

    def seen(self, *numbers: int) -> bool:
        """Whether one of these came since the last :meth:`forget`."""
        return any(number in self._seen for number in numbers)

    def forget(self, number: int) -> None:
        self._seen.discard(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._seen.add(number)

    def _end_child(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid and signal.getsignal(signal.SIGTERM) == self._note:
            end_by_sigterm()


def protect_worker(worker_id: int = 0) -> None:
    """For ``DataLoader(worker_init_fn=…)``: a worker survives the signals that Slurm sends to the whole step, not its parent's.

    A loader's worker dies of SIGTERM otherwise, before the main process has saved, and takes it along.
    Source: torch/csrc/DataLoader.cpp, handler_SIGTERM.
    """
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END, end_worker)


def protect_forked_workers() -> Callable[[], None] | None:
    """From now on every worker that a DataLoader forks in this process is protected, whoever made the loader; how to undo it.

    torch gives each worker its own handler of SIGTERM, by a function that it looks up in a module; there is no public place
    for it.  None where this torch has no such function: then :func:`protect_worker` has to be asked for.  A worker that is
    spawned does not inherit it, either.  Source: torch/utils/data/_utils/worker.py, _worker_loop.
    """
    try:
        from torch.utils.data._utils import signal_handling as torchs
    except ImportError:
        return None
    name = "_set_worker_signal_handlers"
    before = getattr(torchs, name, None)
    if before is None:
        return None
    wanted = True

    def set_and_ignore(*arguments: Any) -> None:
        before(*arguments)
        if wanted:
            protect_worker()

    def undo() -> None:
        nonlocal wanted
        wanted = False  # another run's may lie above it, and keeps it until that one ends
        if getattr(torchs, name) is set_and_ignore:
            setattr(torchs, name, before)

    setattr(torchs, name, set_and_ignore)
    return undo
