"""What follows from the first steps after a resume: nothing, a word, or the way back to an older checkpoint.

Rank 0 judges, with what it knows of the run's log, and all ranks act on its verdict after the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.training.guard import FirstStepsFailed, Guard, Trouble
from slurm_resilience.training.link import Link
from slurm_resilience.training.metrics import MetricsFile
from slurm_resilience.training.track import watched
from slurm_resilience.training.world import World

log = logging.getLogger(__name__)


class FirstSteps:
    """Watches over an attempt until its first steps are taken.

    ``guard`` is rank 0's; ``give_up`` ends a save that is under way and forgets copies in memory.
    """

    def __init__(
        self,
        *,
        world: World,
        link: Link,
        store: CheckpointStore,
        metrics: MetricsFile | None,
        guard: Guard,
        entry: Entry,
        attempt: int,
        by: str,
        give_up: Callable[[], Any],
    ) -> None:
        self._team = world.team
        self._link = link
        self._store = store
        self._metrics = metrics
        self._guard = guard
        self._entry = entry
        self._attempt = attempt
        self._by = by
        self._give_up = give_up
        self.over = guard.over(entry.step)

    def after(self, step: int, said: Mapping[str, Any]) -> None:
        """Judge one completed step.  All ranks must come.  Raises :class:`FirstStepsFailed` on all of them."""
        mine = {name: value for name, value in watched(said).items() if not math.isfinite(value)}
        verdict = self._team.funnel(
            "looking at the first steps", lambda: mine, lambda everyone: self._judge(step, said, everyone)
        )
        self.over = verdict != "go on"
        if not isinstance(verdict, Trouble):
            return
        self._give_up()
        trouble = verdict
        gone = self._team.funnel("going back", lambda: None, lambda _: self._condemn(trouble))
        raise FirstStepsFailed(
            f"The first steps after {self._entry.name} are not those of this run: {trouble}",
            evidence=f"passed its checks when it was loaded; not used any more: {', '.join(gone)}",
            remedy="a supervisor starts the run again from an older checkpoint by itself, else start it by hand; after a "
            "false alarm, slurm-resilience checkpoints release",
        )

    def _judge(self, step: int, said: Mapping[str, Any], everyone: list[dict[str, float]]) -> str | Trouble:
        trouble = self._guard.look(step, said)
        for rank, numbers in enumerate(everyone):
            for name, value in numbers.items():
                trouble = trouble or self._guard.look(step, {name: value})
                if trouble is not None and rank:
                    log.error("rank %d reports %s=%s", rank, name, value)
        if trouble is not None:
            excuse = self._guard.excused(trouble)
            if not excuse and trouble.kind != "not finite" and not self._older(trouble):
                excuse = f"there is no older checkpoint to go back to: {trouble}"
            if not excuse:
                return trouble
            log.error("not the checkpoint's doing, so training goes on: %s", excuse)
            self._tell(step, "inconclusive", [excuse])
            return "stand down"
        if not self._guard.over(step):
            return "go on"
        unseen = self._guard.unseen()
        if unseen:
            log.warning("the first steps after the checkpoint could not be compared in full: %s", "; ".join(unseen))
        self._tell(step, "inconclusive" if unseen else "passed", unseen)
        return "over"

    def _older(self, trouble: Trouble) -> list[Entry]:
        condemned = {entry.name for entry in self._condemned(trouble)}
        return [entry for entry in self._store.entries() if entry.usable and entry.name not in condemned]

    def _condemned(self, trouble: Trouble) -> list[Entry]:
        """The entry, what was taken from its state, and what was taken after the incident began."""
        until = self._guard.good_until(trouble)
        return [
            entry
            for entry in self._store.entries()
            if entry.usable
            and (
                entry.name == self._entry.name
                or entry.step > until
                or (entry.attempt == self._attempt and entry.step > self._entry.step)
            )
        ]

    def _condemn(self, trouble: Trouble) -> list[str]:
        gone = self._condemned(trouble)
        if self._metrics is not None:
            self._metrics.remark("trouble", attempt=self._attempt, to=self._guard.good_until(trouble) + 1, **trouble.to_json())
        for entry in sorted(gone, key=lambda entry: entry.order):
            reason = str(trouble) if entry.name == self._entry.name else f"taken after the incident began: {trouble}"
            log.error("checkpoint %s is not used any more: %s", entry.name, reason)
            self._store.quarantine(entry, reason, self._by)
            self._link.send("checkpoint_quarantined", step=entry.step, name=entry.name, reason=reason)
        self._tell(trouble.step, "failed", [str(trouble)])
        return [entry.name for entry in gone]

    def _tell(self, step: int, verdict: str, reasons: list[str]) -> None:
        self._link.send("first_steps_checked", step=step, checkpoint=self._entry.name, verdict=verdict, reasons=reasons)
