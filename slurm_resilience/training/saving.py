"""Checkpoints of everything registered, taken by all ranks at the same step and, as a rule, written behind training.

A failed save costs that checkpoint and nothing else: the older ones stand, training goes on, and the failure is a fact.
A newer attempt's fence is different: this process is a leftover, and must end.

What a save came to is told when it comes, by the thread that writes, and agreed upon by all ranks (:meth:`Saver.settle`) before
anything is decided with it: ranks learn at different moments that it has ended, and must not act differently.
"""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any

from slurm_resilience.checkpoint.dcp.background import BackgroundSaver, Landed, fits
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, Fenced
from slurm_resilience.progress.sections import LEARNED, Phase
from slurm_resilience.training import rng, state_digest, witness
from slurm_resilience.training.accepting import Acceptance
from slurm_resilience.training.data import Source
from slurm_resilience.training.link import Link
from slurm_resilience.training.local import LocalCopies
from slurm_resilience.training.optimizer import learning_rates
from slurm_resilience.training.pace import Pace
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.sealing import seal
from slurm_resilience.training.state import Registry, Snapshot
from slurm_resilience.training.track import Track
from slurm_resilience.training.verify import last_lr
from slurm_resilience.training.world import World

FORMAT_VERSION = 1

log = logging.getLogger(__name__)


class Saver:
    """Takes checkpoints and remembers when the last one was taken and how long it took.

    ``begun_step`` is the step of the newest save that was begun, ``saved_step`` of the newest that all know to be durable.
    """

    def __init__(
        self,
        *,
        world: World,
        registry: Registry,
        link: Link,
        store: CheckpointStore,
        mesh: dict[str, int],
        pace: Pace,
        background: bool = True,
        copies: LocalCopies | None = None,
    ) -> None:
        self._world = world
        self._registry = registry
        self._link = link
        self._store = store
        self._mesh = mesh
        self._background = background
        self._copies = copies
        self._writer = BackgroundSaver(
            store, process_group=world.checkpoint, ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
        self._flying: int | None = None
        self._before_s = 0.0
        self.pace = pace
        self.batches: dict[str, Source] = {}
        self.probe: Probe | None = None
        self.track = Track()
        self.run_id = ""
        self.config: dict[str, Any] = {}
        self.begun_step: int | None = None
        self.saved_step: int | None = None
        self.acceptance: Acceptance | None = None

    # -- taking -----------------------------------------------------------------------------------------------

    def begin(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the state after ``step`` completed steps, and save it behind training where that is possible.

        All ranks must come.
        Waits for the save before, if that has not ended.  Raises :class:`Fenced` when a newer attempt owns the checkpoints,
        ConfigError for state that cannot be kept.
        """
        self._take(step, metrics, behind=self._background)

    def save(self, step: int, metrics: dict[str, Any]) -> Entry | None:
        """The same, and durable when it returns; None when that failed."""
        self._take(step, metrics, behind=False)
        return self.settle()

    def _take(self, step: int, metrics: dict[str, Any], *, behind: bool) -> None:
        began = time.monotonic()
        if self._world.rank == 0:
            self._link.send("checkpoint_started", step=step)
        self.settle()
        self._link.push("checkpoint" if behind else "save", Phase.CHECKPOINT, LEARNED)
        try:
            snapshot = self._world.team.agree(f"taking the state of step {step}", lambda: self._next_snapshot(step))
            self._seal(snapshot, step)
            self._before_s = time.monotonic() - began
            self._writer.start(
                dict(snapshot.tensors),
                step=step,
                metrics=self._kept_metrics(metrics),
                extra={"training": snapshot.plain},
                per_rank={"rng": rng.capture(), "rng_of": rng.label(step, self._world.rank, self._world.size)},
                mesh=self._mesh,
                behind=behind,
                told=self._tell,
            )
            self._flying = step
        except Fenced:
            raise
        except CheckpointError as error:
            self._failed(step, error)
        finally:
            self.begun_step = step
            self.pace.saved()
            self._link.pop()

    def _next_snapshot(self, step: int) -> Snapshot:
        self._accept()
        return self.snapshot(step)

    def _seal(self, snapshot: Snapshot, step: int) -> None:
        odd = seal(self._world.team, snapshot, self._registry.buffers())
        if odd and self._world.rank == 0:
            ranks = state_digest.ranks_that_differ(odd)
            self._link.send("replicas_differed", step=step, ranks=ranks, tensors=[one.box.key for one in odd[:5]])

    def _tell(self, landed: Landed) -> None:
        """The end of a save, told by whichever thread wrote it."""
        if landed.entry is None:
            self._failed(landed.step, landed.error)
            return
        stall_s, seconds = self._before_s + landed.stall_s, self._before_s + landed.seconds
        if self._world.rank != 0:
            return
        self._link.send(
            "checkpoint_committed",
            step=landed.step,
            name=landed.entry.name,
            bytes=landed.entry.bytes,
            seconds=round(seconds, 6),
            stall_s=round(stall_s, 6),
        )
        self.pace.measured(stall_s, seconds)

    def _failed(self, step: int, error: BaseException | None) -> None:
        why = in_words(error)
        log.error("the checkpoint of step %d was not taken: %s", step, why)
        if self._world.rank == 0 and not isinstance(error, Fenced):
            self._link.send("checkpoint_failed", step=step, error=why)

    def _kept_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The loss, and what retention goes by; the index has no room for everything."""
        wanted = {"loss", self._store.retention.best if self._store.retention else None}
        return {name: value for name, value in metrics.items() if name in wanted and _is_number(value)}

    def snapshot(self, step: int, *, probe: bool = True) -> Snapshot:
        """All that a checkpoint of ``step`` keeps, except what belongs to one rank alone.  Changes nothing.

        Without ``probe`` no forward pass is made for it.
        """
        measured = None
        taken = self._registry.capture()
        if self.probe is not None and probe:
            measured = {"loss": self.probe.measure(self._registry.models.values()), "batch": len(self.probe.batch)}
            measured["low_precision"] = self.probe.low_precision
            taken.tensors.update({f"probe/{place}": one for place, one in enumerate(self.probe.batch)})
        taken.plain.update(
            v=FORMAT_VERSION,
            counters={"step": step, "world": self._world.size},
            data={name: batches.state(step) for name, batches in self.batches.items()},
            lr={label: learning_rates(one) for label, one in self._registry.optimizers.items()},
            last_lr={label: last_lr(one) for label, one in self._registry.schedulers.items()},
            history=self.track.to_json(),
            config=self.config,
            witness=witness.say(self._registry, self.batches, step=step, run_id=self.run_id, attempt=self._store.attempt or 0),
            probe=measured
            if measured is None or math.isfinite(measured["loss"])
            else {**measured, "loss": str(measured["loss"])},
        )
        return taken

    # -- looking after the one that is written now --------------------------------------------------------------

    def poll(self) -> None:
        """After each step: raises :class:`Fenced` when the save in flight was.  Never waits."""
        failure = self._writer.failure
        if isinstance(failure, Fenced):
            raise failure

    def _accept(self) -> None:
        """The mark on the checkpoint that the run came from is set before anything else is written.  Raises :class:`Fenced`."""
        acceptance, self.acceptance = self.acceptance, None
        if acceptance is not None:
            acceptance.wait()

    def settle(self) -> Entry | None:
        """Wait for the save in flight and agree on what it came to: its entry, None when it failed or there is none.

        All ranks must come.  Raises :class:`Fenced`.
        """
        if self._flying is None:
            return None
        step, self._flying = self._flying, None
        self._link.push("save", Phase.CHECKPOINT, LEARNED)
        try:
            entry = self._world.team.agree(f"saving step {step}", self._writer.wait)
        except Fenced:
            raise
        except CheckpointError:
            return None  # told when it happened
        finally:
            self._link.pop()
        self.saved_step = step
        return entry

    def close(self) -> None:
        """Wait for the save in flight on this rank alone, and drop its copy; what went wrong has been told."""
        self._flying = None
        try:
            self._accept()
            self._writer.close()
        except CheckpointError as error:
            log.debug("%s", error)

    # -- copies in the node's own memory ------------------------------------------------------------------------

    def copy(self, step: int) -> None:
        """Take a copy into the node's own memory, if one is due after this step.  All ranks must come."""
        if self._copies is None or not self._copies.due(step):
            return
        snapshot = self._world.team.agree(f"taking the state of step {step}", lambda: self.snapshot(step, probe=False))
        self._copies.take(snapshot, step=step, own={"rng": rng.capture()})

    def drop_copies(self) -> None:
        """The shared checkpoint is as new as any copy: give the node its memory back."""
        if self._copies is not None:
            self._copies.drop()

    def give_up(self) -> None:
        """Nothing is under way any more, and no copy is left in any node's memory.  All ranks must come."""
        self._world.team.agree("accepting the checkpoint", self._accept)
        self.settle()
        self.drop_copies()

    # -- the last one before the end ----------------------------------------------------------------------------

    def save_before(self, deadline: float | None, step: int, metrics: dict[str, Any]) -> bool:
        """Save what can be saved before ``deadline``; whether the state of ``step`` is durable.  All ranks must come.

        A save in flight is waited for and a new one replaces it, if both fit by what saves have taken so far.  If only the
        first fits, it is all there will be: it is nearer to its end than a new one, and at most its own length older.  If not
        even that, nothing is waited for; it may still end in time, while the process does.  Rank 0 decides for all.
        """
        choice, left_s = self._world.team.funnel("the time that is left", lambda: None, lambda _: self._fits(deadline, step))
        if choice != "stop":
            self.settle()
        if self.saved_step == step:
            return True
        if choice == "save":
            return self.save(step, metrics) is not None
        if self._world.rank == 0:
            flying = f"; that of step {self.begun_step} " + ("was waited for" if choice == "wait" else "is not complete")
            said = f"not begun: {left_s:.1f} s are left, the last save took {self._writer.cost_s or 0:.1f} s"
            self._link.send("checkpoint_failed", step=step, error=said + (flying if choice == "wait" or self._flying else ""))
        return False

    def _fits(self, deadline: float | None, step: int) -> tuple[str, float]:
        if deadline is None:
            return "save", math.inf
        left_s = deadline - time.time()
        cost_s = 0.0 if self._flying == step else self._writer.cost_s or 0.0
        return fits(left_s, remaining_s=self._writer.remaining_s(), cost_s=cost_s, margin=MARGIN), left_s


MARGIN = 1.1  # a save that does not end in time harms nobody, one that was not tried loses a stretch of training


def in_words(error: BaseException | None) -> str:
    """What an exception says, and what it is where it says nothing."""
    return str(error).strip() or repr(error)


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63  # beyond, it is no number for others
    return isinstance(value, float) and math.isfinite(value)
