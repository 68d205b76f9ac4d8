"""Where does this run keep its checkpoints, how often does it take them, and which memory of its nodes may it use?"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from slurm_resilience._clock import boot_id
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import Cause, ConfigError
from slurm_resilience.observe.accounts import account
from slurm_resilience.observe.events import read_for_standing
from slurm_resilience.training.identity import Identity
from slurm_resilience.training.local import LocalCopies
from slurm_resilience.training.pace import Pace, Past

log = logging.getLogger(__name__)

_WARNED = frozenset(map(str, (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_DRAINED, Cause.CANCELLED)))


class Keeping(Identity):
    """The side of a ``Run`` that knows its checkpoint root and the settings about it."""

    def _open_store(self) -> CheckpointStore:
        """The root, owned by this attempt from now on.  All ranks must come."""
        about = self._contract
        store = CheckpointStore.open(
            self._checkpoint_root(),
            attempt=self._attempt,
            run_id=self._run_id,
            job_id=about.job_id if about else "",
            restart_count=about.restart_count if about else 0,
            node=about.node if about else socket.gethostname(),
            boot_id=boot_id(),
            retention=self._settings.retention,
            trusted_group=self._settings.trusted_group,
        )
        self._world.team.funnel("opening the checkpoints", lambda: None, lambda _: store.fence())
        return store

    def _local_copies(self) -> LocalCopies | None:
        """The copies in the nodes' memory, if the run keeps any.  All ranks must come."""
        return LocalCopies.of(
            self._settings, world=self._world, link=self._link, run_id=self._run_id, attempt=self._attempt, mesh=self.mesh
        )

    def _pace(self) -> Pace:
        """When timed checkpoints are due; rank 0's counts."""
        leads = self.rank == 0
        every = self._settings.every_min
        return Pace(
            every,
            bounds_min=self._settings.auto_bounds_min,
            past=self._past() if leads and every == "auto" else None,
            tell=self._say_interval if leads else lambda interval_s, reason: None,
        )

    def _say_interval(self, interval_s: float, reason: str) -> None:
        self._link.send("checkpoint_interval_chosen", interval_s=round(interval_s, 3), reason=reason)

    def _fingerprint(self) -> dict[str, Any]:
        """What the experiment was configured as, for its checkpoints, with a digest over it."""
        values: dict[str, Any] = {
            "seed": self.seed,
            "global_batch": self._settings.global_batch,
            "keep_accumulation": self.keep_accumulation,
        }
        return {**values, "sha256": sha256(json.dumps(values, sort_keys=True).encode())}

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """Warn of what the checkpoint was taken with and this attempt has otherwise; whether it is an error, others say."""
        mine = self._fingerprint()
        if self.rank != 0 or not saved or saved.get("sha256") == mine["sha256"]:
            return
        changed = [f"{name} {saved.get(name)!r} is now {mine[name]!r}" for name in mine if saved.get(name) != mine[name]]
        log.warning("the checkpoint was taken with another configuration: %s", "; ".join(changed[:-1] or changed))

    def _past(self) -> Past:
        """How often this run has failed so far, by its own record; what came with a warning cost no work."""
        here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        nodes = len(self.plan.get("nodes") or ()) or max(1, self.world_size // here)
        try:
            seen = account(read_for_standing(self._folder))
        except ConfigError:  # there is no record yet
            return Past(nodes)
        failures = sum(failure.cause not in _WARNED for failure in seen.trace.failures)
        return Past(nodes, max(0.0, seen.ledger.wall_s - seen.ledger.queued_s), failures)
