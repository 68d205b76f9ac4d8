"""[torch] Saves in the background: training waits for the copy, not for the disk.

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
from datetime import timedelta
from typing import Any

import torch.distributed as dist

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


class _Flight:
    """One save in the background: its thread, and what came of it."""

    def __init__(self, step: int, work: Callable[[], Entry]) -> None:
        self.step = step
        self.began = time.monotonic()
        self.entry: Entry | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, args=(work,), name=f"checkpoint-{step}", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Entry]) -> None:
        try:
            self.entry = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the training script looks next
            self.error = error
        self.seconds = time.monotonic() - self.began


class BackgroundSaver:
    """Saves of one store, one at a time, over a process group of their own.

    All ranks make it together: it makes its own gloo group with ``timeout_s`` unless one is given.  That group must be used
    for nothing else, since the background thread talks over it while training talks over others.
    """

    def __init__(
        self, store: CheckpointStore, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._store = store
        self._team = Team(process_group)
        self._staging = Staging()
        self._flight: _Flight | None = None
        self.stall_s = 0.0
        self.cost_s: float | None = None
        atexit.register(self._at_exit)

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved now, None when there is none."""
        return None if self._flight is None or not self._flight.thread.is_alive() else self._flight.step

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
    ) -> Entry | None:
        """Copy the state and save it in the background; returns what the save before came to, if nobody has asked yet.

        Collective.  When it returns, the live tensors may change.  ``stall_s`` says how long it kept training.
        Raises the failure of the save before (the new one is then not begun).
        """
        began = time.monotonic()
        before = self.wait()
        about = About(step, metrics or {}, extra or {}, mesh or {}, world)
        rank = self._team.rank
        planned = plan_save(self._team, self._store, lambda: ranks.add(resolve(state_dict), per_rank or {}, rank), step)
        source = self._stage(planned)
        self._flight = _Flight(step, lambda: finish_save(self._team, self._store, planned, about, source))
        self.stall_s = time.monotonic() - began
        return before

    def poll(self) -> Entry | None:
        """What the save in flight came to, once it has ended and once only; None otherwise.  Never waits.

        Raises :class:`CheckpointError` when it failed.
        """
        flight = self._flight
        if flight is None or flight.thread.is_alive():
            return None
        return self._land(flight)

    def wait(self, timeout_s: float | None = None) -> Entry | None:
        """Wait for the save in flight, if any, and return what it came to.

        Raises :class:`CheckpointError` when it failed, :class:`SaveInFlight` when it takes longer than ``timeout_s``.
        """
        flight = self._flight
        if flight is None:
            return None
        flight.thread.join(timeout_s)
        if flight.thread.is_alive():
            raise SaveInFlight(
                f"The save of step {flight.step} has not ended", evidence=f"waited {timeout_s} s, it began "
                f"{time.monotonic() - flight.began:.1f} s ago"
            )  # fmt: skip
        return self._land(flight)

    def remaining_s(self) -> float:
        """About how long the save in flight still takes, by the one before; 0 when there is none."""
        flight = self._flight
        if flight is None or not flight.thread.is_alive():
            return 0.0
        return max(0.5, (self.cost_s or 0.0) - (time.monotonic() - flight.began))

    def close(self) -> Entry | None:
        """Wait for the save in flight, drop the buffers and the exit hook."""
        try:
            return self.wait()
        finally:
            atexit.unregister(self._at_exit)
            self._staging = Staging()

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
        if flight.error is not None:
            raise flight.error
        assert flight.entry is not None
        self.cost_s = flight.seconds
        return flight.entry

    def _at_exit(self) -> None:
        """The interpreter ends: nothing is dropped in silence."""
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
