"""[torch] Saves in the background: training waits for the copy, not for the disk.

Memory: one copy of what this rank writes (``staged_bytes``), kept from save to save.  Where the copies of a node's ranks would
take more than half of the memory that is free, the save is written in the foreground instead, and says so.

At most one save is in flight.  A second one waits for the first (its wait counts as stall): skipping it would let a slow
file system thin the checkpoints out without a word.  A failure is raised by the next :meth:`BackgroundSaver.poll`,
:meth:`~BackgroundSaver.start` or :meth:`~BackgroundSaver.wait`, and at the latest when the interpreter exits, which
waits for the save in flight and ends with an error when nobody has heard of its failure.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slurm_resilience.checkpoint import memory
from slurm_resilience.checkpoint.dcp import ranks
from slurm_resilience.checkpoint.dcp.plan import Planned, plan_save
from slurm_resilience.checkpoint.dcp.saving import About, finish_save, resolve
from slurm_resilience.checkpoint.dcp.staging import Staging
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.dcp.write import Source
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import SaveInFlight
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, ExitCode

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0
SHARE = 0.5  # of the free memory: the rest is for what training takes besides


@dataclass(frozen=True)
class Landed:
    """What one save came to: ``entry``, or the ``error`` that kept it from being one.

    ``seconds`` from its begin until it was durable, ``stall_s`` of them while training stood.
    """

    step: int
    seconds: float
    stall_s: float
    entry: Entry | None = None
    error: BaseException | None = None


def _nobody(landed: Landed) -> None:
    """Who is told when nobody wants to hear."""


class _Flight:
    """One save: its thread, if it has one, and what came of it."""

    def __init__(self, step: int, began: float, work: Callable[[], Entry], told: Callable[[Landed], None]) -> None:
        self.step = step
        self.began = began
        self.stall_s: float | None = None
        self.landed: Landed | None = None
        self._work = work
        self._told = told
        self._thread: threading.Thread | None = None

    def behind(self) -> None:
        """Do the work in a thread; training goes on now."""
        self.stall_s = time.monotonic() - self.began
        self._thread = threading.Thread(target=self.here, name=f"checkpoint-{self.step}", daemon=True)
        self._thread.start()

    def here(self) -> None:
        """Do the work."""
        entry, error = None, None
        try:
            entry = self._work()
        except BaseException as caught:  # noqa: BLE001 - it is raised where the training script looks next
            error = caught
        seconds = time.monotonic() - self.began
        landed = Landed(self.step, seconds, seconds if self.stall_s is None else self.stall_s, entry, error)
        try:
            self._told(landed)
        except Exception:
            log.exception("what became of the save of step %d could not be told", self.step)
        self.landed = landed

    def join(self, timeout_s: float | None) -> bool:
        """Wait for it; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    @property
    def flying(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


class BackgroundSaver:
    """Saves of one store, one at a time, over a process group of their own.

    All ranks make it together: it makes its own gloo group with ``timeout_s`` unless one is given.  That group must be used
    for nothing else, since the background thread talks over it while training talks over others.  ``ranks_here`` share this
    node's memory.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
        ranks_here: int = 1,
    ) -> None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._store = store
        self._team = Team(process_group)
        self._staging = Staging()
        self._flight: _Flight | None = None
        self._ranks_here = ranks_here
        self._has_room: bool | None = None
        self.stall_s = 0.0
        self.cost_s: float | None = None
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved now, None when there is none."""
        return self._flight.step if self._flight is not None and self._flight.flying else None

    @property
    def failure(self) -> BaseException | None:
        """Why the last save failed, if it did and nobody has asked yet.  Never waits."""
        landed = self._flight.landed if self._flight is not None else None
        return landed.error if landed is not None else None

    @property
    def staged_bytes(self) -> int:
        """Memory that the copies take on this rank."""
        return self._staging.nbytes

    def start(
        self,
        state_dict: dict[str, Any],
        *,
        step: int,
        metrics: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        per_rank: dict[str, Any] | None = None,
        world: int | None = None,
        mesh: dict[str, int] | None = None,
        behind: bool = True,
        told: Callable[[Landed], None] = _nobody,
    ) -> Entry | None:
        """Copy the state and save it in the background; returns what the save before came to, if nobody has asked yet.

        Collective.  When it returns, the live tensors may change.  ``stall_s`` says how long it kept training.  Without
        ``behind``, or without room for a copy on some rank, the save has ended when this returns, and :meth:`wait` tells at
        once what it came to.  ``told`` hears of the end at once, in whichever thread writes.
        Raises the failure of the save before (the new one is then not begun).
        """
        asked = time.monotonic()
        before = self.wait()
        began = time.monotonic()
        about = About(step, metrics or {}, extra or {}, mesh or {}, world)
        rank = self._team.rank
        planned = plan_save(self._team, self._store, lambda: ranks.add(resolve(state_dict), per_rank or {}, rank), step)
        if behind and self._room_for(planned):
            source = self._stage(planned)
            flight = _Flight(step, began, lambda: finish_save(self._team, self._store, planned, about, source), told)
            flight.behind()
        else:
            flight = _Flight(
                step, began, lambda: finish_save(self._team, self._store, planned, about, lambda: planned.planner), told
            )
            flight.here()
        self._flight = flight
        self.stall_s = time.monotonic() - asked
        return before

    def poll(self) -> Entry | None:
        """What the save in flight came to, once it has ended and once only; None otherwise.  Never waits.

        Raises :class:`CheckpointError` when it failed.
        """
        flight = self._flight
        if flight is None or flight.flying:
            return None
        return self._land(flight)

    def wait(self, timeout_s: float | None = None) -> Entry | None:
        """Wait for the save in flight, if any, and return what it came to.

        Raises :class:`CheckpointError` when it failed, :class:`SaveInFlight` when it takes longer than ``timeout_s``.
        """
        flight = self._flight
        if flight is None:
            return None
        if not flight.join(timeout_s):
            raise SaveInFlight(
                f"The save of step {flight.step} has not ended", evidence=f"waited {timeout_s} s, it began "
                f"{time.monotonic() - flight.began:.1f} s ago"
            )  # fmt: skip
        return self._land(flight)

    def remaining_s(self) -> float:
        """About how long the save in flight still takes, by the one before; 0 when there is none."""
        flight = self._flight
        if flight is None or not flight.flying:
            return 0.0
        return max(0.5, (self.cost_s or 0.0) - (time.monotonic() - flight.began))

    def close(self) -> Entry | None:
        """Wait for the save in flight, drop the buffers and the exit hook."""
        try:
            return self.wait()
        finally:
            atexit.unregister(self._at_exit)
            self._staging = Staging()

    def _room_for(self, planned: Planned) -> bool:
        """Whether every rank has room for its copy; asked anew when the state has another layout.  Collective then."""
        if self._has_room is None or planned.anew:
            want = max(0, Staging.bytes_of(planned.part) - self._staging.nbytes) * self._ranks_here

            def look() -> bool:
                free = memory.available_bytes()
                fits = free is not None and want <= free * SHARE
                if not fits:
                    log.warning(
                        "checkpoints are written in the foreground: copies of %.1f MB on this node would be more than half of "
                        "the %s MB that are free", want / 1e6, "unknown" if free is None else f"{free / 1e6:.1f}",
                    )  # fmt: skip
                return fits

            try:
                self._has_room = self._team.funnel("looking for room for a copy", look, all)
            except BaseException:
                if planned.draft is not None:
                    self._store.abandon(planned.draft)
                raise
        return self._has_room

    def _stage(self, planned: Planned) -> Callable[[], Source]:
        """Copy; what goes wrong is raised where all ranks hear of it."""
        staging = self._staging
        try:
            staging.take(planned.part, planned.planner)
        except BaseException as error:  # noqa: BLE001 - _raise hands it to the vote that ends the save
            return lambda failure=error: _raise(failure)  # type: ignore[misc]
        return lambda: staging

    def _land(self, flight: _Flight) -> Entry:
        self._flight = None
        landed = flight.landed
        assert landed is not None
        if landed.error is not None:
            raise landed.error
        assert landed.entry is not None
        self.cost_s = landed.seconds
        return landed.entry

    def _at_exit(self) -> None:
        """The interpreter ends: nothing is dropped in silence.  A child that was forked meanwhile has no part in the save."""
        if os.getpid() != self._pid:
            return
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not be lost now
            log.error("the checkpoint in flight failed while the program ended: %s", error)
            print(f"slurm-resilience: the last checkpoint failed: {error}", file=sys.stderr, flush=True)
            atexit.unregister(self._at_exit)
            atexit._run_exitfuncs()
            os._exit(error.exit_code if isinstance(error, CheckpointError) else ExitCode.BAD_CHECKPOINT)


def _raise(error: BaseException) -> Source:
    raise error


def fits(left_s: float, *, remaining_s: float, cost_s: float, margin: float = 1.5) -> str:
    """What to do about saving in the ``left_s`` seconds before this process is killed.

    ``"save"``: wait for what is in flight and take a new checkpoint; ``"wait"``: only the one in flight still fits;
    ``"stop"``: nothing does, the last committed one has to do.  Rank 0 decides and tells the others.
    """
    if left_s >= margin * (remaining_s + cost_s):
        return "save"
    return "wait" if remaining_s and left_s >= margin * remaining_s else "stop"
