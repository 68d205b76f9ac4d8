"""From nothing to a trusted state: which checkpoint, and what happens when one is not as it should be.

Rank 0 chooses an entry (or all ranks find that their nodes' memory holds a newer one), all ranks prove that they see the
same one, and it is put back and checked (:mod:`restoring`).  Every stage ends in a vote, so that one rank's failure is
everybody's within seconds and nobody waits in the next collective.

Who is to blame decides what follows.  Bytes that are not those that were saved, or a check that fails, condemn the
entry: quarantine, next older one, everything loaded anew.  Another model or other data condemn nothing: an error for the
user.  An object that refuses its state could be either; the entry is condemned only once an older one was accepted.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, Fenced, NoValidCheckpoint
from slurm_resilience.training.accepting import Acceptance
from slurm_resilience.training.entry_source import Local, Shared, Unmarked
from slurm_resilience.training.link import Link
from slurm_resilience.training.local import LocalCopies
from slurm_resilience.training.passed_over import tell_passed_over
from slurm_resilience.training.refused import CheckFailed, RestoreFailed
from slurm_resilience.training.restoring import Restorer, place
from slurm_resilience.training.state import Registry, Snapshot
from slurm_resilience.training.verify import Check
from slurm_resilience.training.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """How a run came back: its step, from which entry, how long it took, and whether random numbers repeat exactly.

    ``verify_s`` is the part of ``seconds`` that all checks took.  ``tier`` is "local" for copies in the nodes' memory.
    """

    step: int
    entry: Entry
    seconds: float
    verify_s: float
    rng: str
    saved: dict[str, Any]
    checks: list[Check]
    rejected: list[tuple[Entry, str]] = field(default_factory=list)
    tier: str = "shared"

    @property
    def data(self) -> dict[str, Any]:
        """The place of each stream of batches."""
        return dict(self.saved["data"])


class Resumer:
    """Restores one run's objects from one store."""

    def __init__(self, *, world: World, registry: Registry, link: Link, store: CheckpointStore, seed: int, by: str) -> None:
        self._world = world
        self._team = world.team
        self._registry = registry
        self._link = link
        self._store = store
        self._by = by
        self.restorer = Restorer(world=world, registry=registry, link=link, seed=seed)
        self.excused: frozenset[int] = frozenset()
        self.copies: LocalCopies | None = None
        self.acceptance: Acceptance | None = None

    def resume(self) -> Resumed | None:
        """Restore from the newest entry that can be trusted; None when there is none at all.  All ranks must come.

        Raises :class:`NoValidCheckpoint` when there are entries and none can be trusted, MismatchedCheckpoint or ConfigError
        when they are about another model, other data or another batch.
        """
        began = time.monotonic()
        rejected: list[tuple[Entry, str]] = []
        doubtful: list[tuple[Entry, RestoreFailed]] = []
        if self.excused:
            self._lead("excusing checkpoints that were being loaded", lambda: self._store.excuse(self.excused))
        local = self._from_copies(began)
        if local is not None:
            return local
        candidates: Iterator[Entry] = self._store.candidates() if self._team.leads else iter(())
        before = self._as_built() if self.restorer.limits.start_fresh else None
        for number in itertools.count():
            choose = functools.partial(self._next, candidates, number, began)
            entry = self._team.funnel("choosing a checkpoint", lambda: None, choose)
            if entry is None:
                break
            try:
                saved, checks, how, verify_s = self.restorer.put_back(Shared(self._store, entry, self._world))
            except (CorruptCheckpoint, CheckFailed) as error:
                rejected.append((entry, error.what))
                self._quarantine(entry, error.what)
                continue
            except RestoreFailed as error:
                log.error("checkpoint %s could not be put back: %s", entry.name, error)
                doubtful.append((entry, error))
                continue
            for other, refusal in doubtful:
                rejected.append((other, refusal.what))
                self._quarantine(other, f"{refusal.what}, while the older {entry.name} was put back")
            now = time.monotonic()
            if self._team.leads:
                self.acceptance = Acceptance(functools.partial(self._store.mark_verified, entry, self._by))
            tell_passed_over(self._store, self._link, entry, leads=self._team.leads)
            return Resumed(entry.step, entry, now - began, verify_s, how, saved, checks, rejected)
        if doubtful:
            raise doubtful[0][1]
        if before is not None:
            self._start_over(before, rejected)
            return None
        self._team.funnel("choosing a checkpoint", lambda: None, lambda _: self._refuse_to_start_over(rejected))
        return None

    def _next(self, candidates: Iterator[Entry], number: int, began: float, _: list[None]) -> Entry | None:
        """The next one to try, as far as number and time allow.  Raises :class:`NoValidCheckpoint` when they do not."""
        entry, limits = next(candidates, None), self.restorer.limits
        past_s = time.monotonic() - began
        if entry is not None and number and (number >= limits.most_entries or past_s > limits.most_s):
            if limits.start_fresh:
                return None
            raise NoValidCheckpoint(
                f"{number} checkpoints could not be trusted within {past_s:.0f} s, and no more are tried",
                evidence=f"verify.most_entries is {limits.most_entries}, verify.most_s {limits.most_s:g}; "
                f"the next would be {entry.name}",
                remedy="slurm-resilience checkpoints list says why each was refused; raise these limits to go further back",
            )
        return entry

    def _as_built(self) -> Snapshot:
        """A copy of what the script has built, since a load that is given up leaves half a state behind."""
        taken = self._registry.capture()
        return Snapshot({key: value.clone() for key, value in taken.tensors.items()}, taken.plain)

    def _start_over(self, before: Snapshot, rejected: list[tuple[Entry, str]]) -> None:
        """Everything as the script has built it, since the user asked for that (``verify.start_fresh``)."""
        if not rejected:
            return
        log.error("none of %d checkpoints can be trusted: training starts over, as verify.start_fresh says", len(rejected))
        self._registry.restore(before.plain, before.tensors)
        for name, batches in self.restorer.batches.items():
            place(batches, name, 0, {})

    def _from_copies(self, began: float) -> Resumed | None:
        """From copies in the nodes' memory, where every rank has one that is newer than every shared checkpoint."""
        if self.copies is None:
            return None
        tier = self.copies.tier
        shared = self._team.funnel("looking for a checkpoint", lambda: None, lambda _: self._store.latest())
        while (entry := tier.find(newer_than=shared)) is not None:
            try:
                saved, checks, how, verify_s = self.restorer.put_back(Local(tier, entry, self._team))
            except Fenced:
                raise
            except CheckpointError as error:
                self.copies.failed(entry.step, str(error))
                self._team.agree("refusing the local copies", functools.partial(tier.refuse, entry, error.what))
                continue
            self._team.agree("accepting the local copies", functools.partial(tier.accept, entry, self._by))
            now = time.monotonic()
            return Resumed(entry.step, entry, now - began, verify_s, how, saved, checks, tier="local")
        return None

    def _refuse_to_start_over(self, rejected: list[tuple[Entry, str]]) -> None:
        """A run that has checkpoints, also ones condemned by earlier attempts, never begins again at step 0 by itself."""
        condemned = rejected or [(entry, entry.reason) for entry in self._store.entries()]
        if condemned:
            raise NoValidCheckpoint(
                f"None of the {len(condemned)} checkpoints in {self._store.root} can be trusted, so the run does not go on",
                evidence="; ".join(f"{entry.name}: {reason}" for entry, reason in condemned[:4]),
                remedy="slurm-resilience checkpoints release, if this is a false alarm; otherwise start a new run folder",
            )

    def verify(self, entry: Entry) -> tuple[list[Check], str, dict[str, float]]:
        """All checks of one entry, which keeps its marks: what they found, why it would be refused (or ""), and seconds.

        Afterwards the objects hold that entry's state, or half of it.  All ranks must come.
        """
        began = time.monotonic()
        checks: list[Check] = []
        reason = ""
        try:
            _, checks, _, verify_s = self.restorer.put_back(Unmarked(self._store, entry, self._world), checks)
        except (CorruptCheckpoint, CheckFailed, RestoreFailed) as error:
            reason, verify_s = error.what, 0.0
        load_s = time.monotonic() - began - verify_s
        return checks, reason, {"load_s": round(load_s, 6), "verify_s": round(verify_s, 6)}

    def _quarantine(self, entry: Entry, reason: str) -> None:
        log.error("checkpoint %s is not used any more: %s", entry.name, reason)
        self._lead("quarantining", lambda: self._store.quarantine(entry, reason, self._by))
        if self._team.leads:
            self._link.send("checkpoint_quarantined", step=entry.step, name=entry.name, reason=reason)

    def _lead(self, stage: str, work: Any) -> None:
        self._team.funnel(stage, lambda: None, lambda _: work())
