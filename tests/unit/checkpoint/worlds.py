"""Small real gloo worlds: ranks forked from one process that has imported torch, so that a world costs no import.

``run(4, work, *args)`` calls ``work(rank, world, *args)`` on four ranks and returns their results in order.  ``work`` is a
function of a module; the default process group is initialised (no torch.distributed at all for a world of one).
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 100
PRELOAD = [
    "torch",
    "torch._dynamo",  # fully_shard imports it at its first call: seconds a rank, in each world
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "slurm_resilience.checkpoint.dcp.background",
    "slurm_resilience.checkpoint.dcp.loading",
]


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


class Killed:
    """What stands for the result of a rank that ended without one."""

    def __init__(self, exit_code: int | None) -> None:
        self.exit_code = exit_code

    def __repr__(self) -> str:
        return f"Killed({self.exit_code})"


def _context() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = GROUP_TIMEOUT_S
) -> list[tuple[Any, multiprocessing.connection.Connection]]:
    """Start the ranks of a world; each one's process, and the pipe on which its result will come."""
    context = _context()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = folder / "store"
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, str(store), timeout_s, theirs, work, args), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    return ranks


def collect(ranks: Sequence[tuple[Any, multiprocessing.connection.Connection]], *, within_s: float = 240.0) -> list[Any]:
    """The results; :class:`Killed` for a rank that was killed.  Raises :class:`RankFailed` when one raised."""
    deadline = time.monotonic() + within_s
    results: list[Any] = []
    try:
        for rank, (process, pipe) in enumerate(ranks):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailed(f"rank {rank} gave no result within {within_s:.0f} s")
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join(60)
                results.append(Killed(process.exitcode))
                continue
            if not ok:
                raise RankFailed(f"rank {rank} raised:\n{value}")
            results.append(value)
    finally:
        for process, pipe in ranks:
            if process.is_alive():
                process.join(0.0 if len(results) < len(ranks) else 10.0)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            pipe.close()
    return results


def run(
    world: int, work: Callable[..., Any], *args: Any, within_s: float = 240.0, timeout_s: float = GROUP_TIMEOUT_S
) -> list[Any]:
    """Start a world and wait for its results."""
    return collect(start(world, work, *args, timeout_s=timeout_s), within_s=within_s)


def wait_until(condition: Callable[[], bool], within_s: float, otherwise: str) -> None:
    """Look every few milliseconds.  Raises AssertionError with ``otherwise`` when it takes too long."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.002)


def _rank(
    rank: int, world: int, store: str, timeout_s: float, pipe: multiprocessing.connection.Connection,
    work: Callable[..., Any], args: tuple[Any, ...],
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
        value = work(rank, world, *args)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    else:
        pipe.send_bytes(pickle.dumps((True, value)))  # by value: multiprocessing would pass tensors as file descriptors
        if world > 1:
            dist.destroy_process_group()
