"""Functions that know nothing of ``Run``, submitit's Checkpointable among them: supervised, requeued, called again.

A plain function starts over in the next attempt.  An object with ``checkpoint()`` or ``__submitit_checkpoint__()`` is asked for
its successor when the run has to stop, as submitit does: on rank 0, in the main thread, between two of its lines.  What it
returns is called in the next attempt; None means that it does not want one.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.facts import FactSender
from slurm_resilience.progress.page import PageWriter
from slurm_resilience.submit.payload import Call, CallFolder, Result

_LOOK_EVERY_S = 0.2
_BEAT_EVERY = 5  # looks
HOOKS = ("checkpoint", "__submitit_checkpoint__")


def wants_run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the function expects a ``Run`` before ``args``: by its signature, and where that fits both ways by its name.

    ``def train(run, lr)`` and ``def train(r, lr)`` do when called with one value; ``def main(cfg)`` does not.
    """
    if any(hasattr(function, hook) for hook in HOOKS):
        return False
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return False
    with_run, without = (_binds(signature, [*extra, *args], kwargs) for extra in ((None,), ()))
    if with_run != without:
        return with_run
    first = next(iter(signature.parameters.values()), None)
    if first is None:
        return False
    note = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
    return first.name == "run" or note.strip("'\"").rpartition(".")[2] == "Run" or not without


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def run_classic(folder: CallFolder, call: Call) -> None:
    """Call the function in this rank, and tell the agent how it ended.  Its exceptions pass through."""
    contract = RankContract.from_environment()
    rank = int(os.environ.get("RANK", "0"))
    os.environ["SUBMITIT_EXECUTOR"] = "resilient"
    os.environ["SUBMITIT_FOLDER"] = str(folder.path)
    if "submitit" in sys.modules:  # the function brought it along
        from slurm_resilience.submit.plugin import make_known

        make_known()
    if contract is None:
        folder_result(folder, 0, rank, call.function(*call.args, **call.kwargs))
        return
    facts = FactSender(contract.facts, attempt=contract.attempt, rank=rank)
    page = PageWriter(contract.page)
    facts.send("started_fresh")
    page.beat(0)
    facts.send("first_step", step=0)
    ender = _Ender(folder, call, contract, facts, page, rank)
    ender.start()
    value = call.function(*call.args, **call.kwargs)
    ender.over.set()
    folder_result(folder, contract.attempt, rank, value)
    facts.send("finished", step=0, outcome="completed")
    page.done()


def folder_result(folder: CallFolder, attempt: int, rank: int, value: Any) -> None:
    """Rank 0's value is the run's."""
    if rank == 0:
        folder.write_result(Result(attempt, value))


class _Ender(threading.Thread):
    """Beats for a function that cannot, and ends it when the run has to stop.

    A function that stands still cannot be told from one that works: only its process is watched.
    """

    def __init__(
        self, folder: CallFolder, call: Call, contract: RankContract, facts: FactSender, page: PageWriter, rank: int
    ) -> None:
        super().__init__(name="resilience-ender", daemon=True)
        self._folder, self._call, self._contract = folder, call, contract
        self._facts, self._page, self._rank = facts, page, rank
        self.over = threading.Event()
        hook = next((getattr(call.function, name) for name in HOOKS if hasattr(call.function, name)), None)
        self._hook: Callable[..., Any] | None = hook
        # The object may change while it works: it is asked where it stands in the main thread, between two of its lines.
        signal.signal(signal.SIGUSR2, self._in_main_thread)

    def run(self) -> None:
        looks = 0
        while not self.over.wait(_LOOK_EVERY_S):
            looks += 1
            if looks % _BEAT_EVERY == 0:
                self._page.beat(0)
            if self._page.orders().stop:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                return

    def _in_main_thread(self, signum: int, frame: Any) -> None:
        orders = self._page.orders()
        if not orders.stop or self.over.is_set():
            return
        saved = False
        if self._hook is not None and self._rank == 0:
            again = self._hook(*self._call.args, **self._call.kwargs)
            if again is not None:
                self._folder.write(again.function, again.args, again.kwargs, with_run=False)
                saved = True
        elif self._hook is not None:
            _wait_for_rank_0(orders.deadline)
        self._facts.send("stopped", step=0, why=orders.cause, saved=saved)
        self._page.done()
        os._exit(0)


def _wait_for_rank_0(deadline: float | None) -> None:
    """Rank 0's successor may want the others' files; they stay a moment.  submitit's own ranks wait to be killed."""
    with contextlib.suppress(OSError):
        time.sleep(min(1.0, max(0.0, (deadline or 0.0) - time.time())))
