"""Small worlds of real ranks: forked from one server process that has imported torch, each with a gloo group over loopback.

The test process plays the agent: it makes the pages, gives the orders and reads the facts.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.facts import FactReceiver
from slurm_resilience.progress.page import PageReader, Progress

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "slurm_resilience.training.run",
]
DEADLINE_S = 120.0

# Programs travel by their module's name, which pytest makes without sys.path (--import-mode=importlib).
_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


_begun: list[Started] = []


@atexit.register
def _end_server() -> None:
    # The server lives as long as one of its children, so those that a failed test has left behind go first.
    while _begun:
        _begun[-1].end()
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


class RankError(Exception):
    """What a rank raised: the name of the exception's type, its text, and the rank."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


def _rank(program: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], answer: Connection) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        answer.send(("ok", program(*args)))
    except BaseException as error:
        answer.send(("error", type(error).__name__, str(error), traceback.format_exc()))
    finally:
        answer.close()
        # As an interpreter would at its end, but without waiting for gloo's peers.
        os._exit(0)


@dataclass(eq=False)
class Started:
    """A world that runs; :meth:`results` waits for its end."""

    processes: list[Any]
    answers: list[Connection]
    store: Any = None
    pages: list[PageReader] = field(default_factory=list)
    receivers: list[FactReceiver] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def hear(self) -> list[dict[str, Any]]:
        """All facts so far, in the order in which they arrived per rank."""
        for receiver in self.receivers:
            self.facts += receiver.receive()
        return self.facts

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fact for fact in self.hear() if fact["kind"] == kind]

    def progress(self) -> list[Progress]:
        return [page.read() for page in self.pages]

    def until(self, condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Wait for a condition; a rank that failed, or the deadline, is an error."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                seen = f"{self.progress()}; facts: {self.hear()}"
                self.end()
                raise TimeoutError(seen)
            if any(answer.poll() for answer in self.answers):
                raise AssertionError(f"a rank ended early: {self.results(within_s=5)}")
            time.sleep(0.005)

    def results(self, within_s: float = DEADLINE_S) -> list[Any]:
        """What the program returned on each rank.  Raises :class:`RankError` for the first one that failed."""
        deadline = time.monotonic() + within_s
        found: dict[int, Any] = {}
        waiting = dict(enumerate(self.answers))
        try:
            while waiting:
                ready = wait(list(waiting.values()), timeout=0.02)
                self.hear()
                if time.monotonic() > deadline:
                    if any(one[0] == "error" for one in found.values()):
                        break  # the others wait for that one
                    raise TimeoutError(f"ranks {sorted(waiting)} did not end; {self.progress()}; facts: {self.facts}")
                for rank, answer in list(waiting.items()):
                    if answer in ready:
                        del waiting[rank]
                        try:
                            found[rank] = answer.recv()
                        except EOFError:
                            found[rank] = ("error", "Gone", "the process ended without a word", "")
                failed = [(rank, one) for rank, one in found.items() if one[0] == "error"]
                if failed and (len(found) == len(self.answers) or failed[0][1][1] == "Gone"):
                    break
            self.hear()
        finally:
            self.end()
        errors = sorted((rank, one) for rank, one in found.items() if one[0] == "error")
        if errors:
            rank, (_, kind, text, trace) = errors[0]
            raise RankError(rank, kind, text, trace)
        return [found[rank][1] for rank in range(len(self.answers))]

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for part in (*self.pages, *self.receivers):
            part.close()
        self.pages, self.receivers, self.store = [], [], None
        if self in _begun:
            _begun.remove(self)


def start(
    world: int,
    program: Callable[..., Any],
    *args: Any,
    run_dir: Path | None = None,
    attempt: int = 1,
    settings: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> Started:
    """Start ``program(*args)`` on each rank.  With ``run_dir`` an agent (this process) looks after them."""
    from torch.distributed import TCPStore

    # On a port that the kernel chooses and this process keeps: one that was free a moment ago may be somebody's by now.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    started = Started([], [], store)
    _begun.append(started)
    for rank in range(world):
        env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        env |= environment or {}
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            page = Path("/dev/shm") / f"sr-test-{os.getpid()}-{port}-{rank}"
            facts = Path("/tmp") / f"sr-test-{os.getpid()}-{port}-{rank}.sock"
            started.pages.append(PageReader(page))
            started.receivers.append(FactReceiver(facts))
            env |= RankContract(
                run_dir=str(run_dir),
                run_id="test",
                attempt=attempt,
                restart_count=0,
                job_id="1",
                node=f"node-{rank}",
                page=str(page),
                facts=str(facts),
                checkpoints=str(run_dir / "checkpoints"),
                settings=settings or {},
                plan=plan or {},
            ).to_environment()
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(program, args, env, theirs), daemon=True)
        process.start()
        theirs.close()
        started.processes.append(process)
        started.answers.append(mine)
    return started


def run_world(world: int, program: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """:func:`start`, and wait for the results."""
    return start(world, program, *args, **options).results()
