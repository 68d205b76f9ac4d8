"""Why is the checkpoint that a run resumes from not the newest one?  Said once, by rank 0, so that nobody has to find out."""

from __future__ import annotations

import logging

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.training.link import Link

MOST_TOLD = 8

log = logging.getLogger(__name__)


def tell_passed_over(store: CheckpointStore, link: Link, chosen: Entry | None, *, leads: bool) -> None:
    """Say which newer checkpoints were left out, the newest few of them; those that were quarantined have been told of then."""
    if not leads:
        return
    told = 0
    try:
        for entry, reason in store.passed_over(chosen):
            log.warning("checkpoint %s was passed over: %s", entry.name, reason)
            link.send("checkpoint_passed_over", step=entry.step, name=entry.name, reason=reason)
            told += 1
            if told >= MOST_TOLD:
                return
    except OSError as error:
        log.warning("nobody can say which checkpoints were passed over: %s", error)
