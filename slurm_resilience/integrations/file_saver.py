"""Checkpoints that a framework writes in its own format: each is committed or it is none, and only whole ones are read."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint import payload, verify
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore, Draft
from slurm_resilience.errors import CheckpointError, Fenced, NoValidCheckpoint
from slurm_resilience.progress.page import Phase
from slurm_resilience.progress.sections import LEARNED
from slurm_resilience.training.link import Link
from slurm_resilience.training.pace import Pace
from slurm_resilience.training.passed_over import tell_passed_over
from slurm_resilience.training.world import World

MARGIN = 1.1
MOST_TRIES = 8

Write = Callable[[Path], None]

log = logging.getLogger(__name__)


class FileSaver:
    """Takes checkpoints by having ``write(folder)`` called on every rank, and commits what it left there.

    ``begun_step`` and ``saved_step`` are of the newest save that was begun, and that is durable.
    """

    def __init__(
        self,
        *,
        world: World,
        link: Link,
        store: CheckpointStore,
        write: Write,
        mesh: dict[str, int],
        pace: Pace,
        extra: Callable[[int], dict[str, Any]] = lambda step: {},
    ) -> None:
        self.pace = pace
        self.begun_step: int | None = None
        self.saved_step: int | None = None
        self._world, self._link, self._store, self._write, self._mesh = world, link, store, write, mesh
        self._extra = extra
        self._cost_s: float | None = None
        self._bytes = 0

    def begin(self, step: int, metrics: dict[str, Any]) -> None:
        """The same as :meth:`save`: nobody but the framework knows how to take its state, so nothing can be written later."""
        self.save(step, metrics)

    def save(self, step: int, metrics: dict[str, Any]) -> Entry | None:
        """A durable checkpoint of ``step``; None when that failed.  All ranks must come.  Raises :class:`Fenced`."""
        leads = self._world.rank == 0
        self._link.push("save", Phase.CHECKPOINT, LEARNED)
        began = time.monotonic()
        if leads:
            self._link.send("checkpoint_started", step=step)
        try:
            entry = self._save(step, metrics)
        except Fenced:
            raise
        except CheckpointError as error:
            log.error("the checkpoint of step %d was not taken: %s", step, error)
            if leads:
                self._link.send("checkpoint_failed", step=step, error=str(error))
            return None
        finally:
            self.begun_step = step
            self.pace.saved()
            self._link.pop()
        self.saved_step, self._bytes, self._cost_s = step, entry.bytes, time.monotonic() - began
        if leads:
            seconds = round(self._cost_s, 6)
            told = {"step": step, "name": entry.name, "bytes": entry.bytes, "seconds": seconds, "stall_s": seconds}
            self._link.send("checkpoint_committed", **told)
            self.pace.measured(seconds, seconds)
        return entry

    def _save(self, step: int, metrics: dict[str, Any]) -> Entry:
        team, stage = self._world.team, f"saving step {step}"
        draft: list[Draft] = []

        def begin(_: list[None]) -> str:
            draft.append(self._store.begin(step, expected_bytes=self._bytes))
            (draft[0].path / payload.FOLDER).mkdir()
            return str(draft[0].path)

        directory = Path(team.funnel(stage, lambda: None, begin))

        def commit(_: list[None]) -> Entry:
            files, items = payload.take(directory)
            kept = {name: value for name, value in metrics.items() if name == "loss" and _is_number(value)}
            return self._store.commit(
                draft[0], world=team.world, files=files, items=items, mesh=self._mesh, metrics=kept, extra=self._extra(step)
            )

        try:
            return team.funnel(stage, lambda: self._write(directory / payload.FOLDER), commit)
        except BaseException:
            if draft:
                self._store.abandon(draft[0])
            raise

    def save_before(self, deadline: float | None, step: int, metrics: dict[str, Any]) -> bool:
        """Save if that fits before ``deadline``, by what the last save took; whether ``step`` is durable."""
        if self.saved_step == step:
            return True
        left_s = math.inf if deadline is None else deadline - time.time()
        fits = self._world.team.funnel(
            "the time that is left", lambda: None, lambda _: left_s > 0 and left_s > MARGIN * (self._cost_s or 0.0)
        )
        if fits:
            return self.save(step, metrics) is not None
        if self._world.rank == 0:
            error = f"not begun: {left_s:.1f} s are left, the last save took {self._cost_s or 0:.1f} s"
            self._link.send("checkpoint_failed", step=step, error=error)
        return False

    def poll(self) -> None:
        """Nothing is in flight."""

    def settle(self) -> Entry | None:
        """Nothing is in flight."""
        return None

    def copy(self, step: int) -> None:
        """There are no copies in the node's memory."""

    def drop_copies(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing is left behind."""


class FileReader:
    """Finds the newest checkpoint that is whole, byte for byte."""

    def __init__(self, *, world: World, link: Link, store: CheckpointStore, by: str) -> None:
        self._world, self._link, self._store, self._by = world, link, store, by

    def newest(self) -> tuple[Entry, Path] | None:
        """Entry and folder of the newest whole checkpoint, None when there is none at all; bad ones are quarantined.

        All ranks must come.  Raises :class:`NoValidCheckpoint` when there are some and none can be trusted.
        """
        team = self._world.team
        candidates: Iterator[Entry] = self._store.candidates() if team.leads else iter(())
        rejected: list[tuple[Entry, str]] = []
        for _ in range(MOST_TRIES):
            entry = team.funnel("choosing a checkpoint", lambda: None, lambda _: next(candidates, None))
            if entry is None:
                break
            problem = self._read(entry)
            if not problem:
                tell_passed_over(self._store, self._link, entry, leads=team.leads)
                return entry, self._store.path(entry) / payload.FOLDER
            rejected.append((entry, problem))
            self._condemn(entry, problem)
        team.funnel("choosing a checkpoint", lambda: None, lambda _: self._refuse_to_start_over(rejected))
        return None

    def _read(self, entry: Entry) -> str:
        """What is wrong with it, "" when it is whole; then it is marked as being loaded."""

        def look(_: list[None]) -> str:
            problem = self._problem(entry)
            if not problem:
                self._store.mark_attempted(entry)
            return problem

        return self._world.team.funnel("reading the checkpoint", lambda: None, look)

    def _problem(self, entry: Entry) -> str:
        found = verify.verify(self._store.path(entry), entry)
        return f"{found[0]} ({len(found)} problems)" if len(found) > 1 else str(found[0]) if found else ""

    def _condemn(self, entry: Entry, reason: str) -> None:
        log.error("checkpoint %s is not to be trusted: %s; the next older one is tried", entry.name, reason)
        self._world.team.funnel("quarantining", lambda: None, lambda _: self._store.quarantine(entry, reason, self._by))
        if self._world.rank == 0:
            self._link.send("checkpoint_quarantined", step=entry.step, name=entry.name, reason=reason)

    def _refuse_to_start_over(self, rejected: list[tuple[Entry, str]]) -> None:
        condemned = rejected or [(entry, entry.reason) for entry in self._store.entries()]
        if condemned:
            raise NoValidCheckpoint(
                f"None of the {len(condemned)} checkpoints in {self._store.root} can be trusted, so the run does not go on",
                evidence="; ".join(f"{entry.name}: {reason}" for entry, reason in condemned[:4]),
                remedy="slurm-resilience checkpoints release, if this is a false alarm; otherwise start a new run folder",
            )

    def accept(self, entry: Entry) -> None:
        """The framework has taken it.  All ranks must come."""
        self._world.team.funnel("accepting the checkpoint", lambda: None, lambda _: self._store.mark_verified(entry, self._by))


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63  # beyond, it is no number for others
    return isinstance(value, float) and math.isfinite(value)
