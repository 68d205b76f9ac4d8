"""Copies in the node's own memory: when one is due, and what is said when one cannot be had.

They only ever save time.  Whatever goes wrong with them is said once, and training, or the resume, goes on with the
shared checkpoints.
"""

from __future__ import annotations

import logging
from typing import Any

from slurm_resilience.checkpoint.dcp.local import LocalTier
from slurm_resilience.errors import CheckpointError, Fenced
from slurm_resilience.training.link import Link
from slurm_resilience.training.sealing import seal_own
from slurm_resilience.training.settings import Settings
from slurm_resilience.training.state import Snapshot
from slurm_resilience.training.world import World

log = logging.getLogger(__name__)


class LocalCopies:
    """One rank's copies, every so many steps."""

    def __init__(self, tier: LocalTier, every_steps: int, link: Link) -> None:
        self.tier = tier
        self._every = every_steps
        self._link = link
        self._said = False

    @classmethod
    def of(
        cls, settings: Settings, *, world: World, link: Link, run_id: str, attempt: int, mesh: dict[str, int]
    ) -> LocalCopies | None:
        """The run's copies, None where it keeps none, or where one of the ranks cannot.  All ranks must come."""
        every = settings.local_every_steps
        if every is None:
            return None
        made: list[LocalTier] = []

        def make() -> None:
            try:
                made.append(LocalTier(run_id, team=world.team, attempt=attempt, base=settings.local_dir, mesh=mesh))
            except OSError as error:
                raise CheckpointError(f"No copies can be kept on this node: {error}") from error

        try:
            world.team.agree("opening the local copies", make)
        except Fenced:
            raise
        except CheckpointError as error:
            log.warning("%s", error)
            if world.rank == 0:
                link.send("local_copy_failed", error=str(error))
            return None
        return cls(made[0], every, link)

    def due(self, step: int) -> bool:
        """Whether one is to be taken after this step."""
        return step % self._every == 0

    def take(self, snapshot: Snapshot, *, step: int, own: dict[str, Any]) -> None:
        """Copy this rank's part.  Not collective: a rank that could not only makes everybody's older copies count.

        Raises :class:`Fenced`.
        """
        try:
            seal_own(snapshot)
            self.tier.save(dict(snapshot.tensors), step=step, extra={"training": snapshot.plain}, per_rank=own)
        except Fenced:
            raise
        except (CheckpointError, OSError) as error:
            self.failed(step, str(error))
        else:
            self._said = False

    def failed(self, step: int, error: str) -> None:
        """Say what went wrong, once in a row."""
        if not self._said:
            log.warning("the copy of step %d in this node's memory is of no use: %s", step, error)
            self._link.send("local_copy_failed", step=step, error=error)
        self._said = True

    def drop(self) -> None:
        """Remove them."""
        self.tier.discard()
