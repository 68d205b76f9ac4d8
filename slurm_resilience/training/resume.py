"""From nothing to a trusted state: which checkpoint, in what order, and what happens when one is not as it should be.

The order, in one place: everything is constructed → rank 0 chooses an entry (or all ranks find that their nodes' memory holds a
newer one), all ranks prove that they see the same one → it
is marked as attempted → tensors are loaded → models → optimizers → schedulers → scaler and others (``Registry.restore`` says
why) → counters → place in the data → checks → random generators, last, because everything before may draw from them.  Every
stage ends in a vote, so that one rank's failure is everybody's within seconds and nobody waits in the next collective.

Who is to blame decides what follows.  Bytes that are not those that were saved, or a check that fails, condemn the
entry: quarantine, next older one, everything loaded anew.  Another model or other data condemn nothing: an error for the
user.  An object that refuses its state could be either; the entry is condemned only once an older one was accepted.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slurm_resilience.checkpoint import dcp
from slurm_resilience.checkpoint.dcp.local import LocalTier
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, Fenced, FormatError, NoValidCheckpoint, ResilienceError
from slurm_resilience.training import rng, state_digest
from slurm_resilience.training.data import Source
from slurm_resilience.training.layout import Layout
from slurm_resilience.training.link import Link
from slurm_resilience.training.local import LocalCopies
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.recompute import Recompute
from slurm_resilience.training.refused import CheckFailed, RestoreFailed
from slurm_resilience.training.saving import FORMAT_VERSION
from slurm_resilience.training.state import Registry, Snapshot
from slurm_resilience.training.track import Rows
from slurm_resilience.training.verify import CHECKS, Check, CheckFn, OwnRun, Restored, Verdict, close, equal
from slurm_resilience.training.verifying import Verifying
from slurm_resilience.training.world import World

MOST_REASONS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """How a run came back: its step, from which entry, how long it took, and whether random numbers repeat exactly.

    ``verify_s`` is the part of ``seconds`` after everything was put back.  ``tier`` is "local" for copies in the nodes' memory.
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
        self._seed = seed
        self._by = by
        self.batches: dict[str, Source] = {}
        self.probe: Probe | None = None
        self.extra_checks: tuple[CheckFn, ...] = ()
        self.excused: frozenset[int] = frozenset()
        self.copies: LocalCopies | None = None
        self.own: OwnRun | None = None
        self.limits = Verifying()
        self.logged: Rows = {}
        self.recompute: Recompute | None = None

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
        before = self._as_built() if self.limits.start_fresh else None
        for number in itertools.count():
            choose = functools.partial(self._next, candidates, number, began)
            entry = self._team.funnel("choosing a checkpoint", lambda: None, choose)
            if entry is None:
                break
            try:
                saved, checks, how, put_back_at = self._try(_Shared(self._store, entry, self._world, self._team))
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
            self._lead("accepting the checkpoint", lambda e=entry: self._store.mark_verified(e, self._by))
            now = time.monotonic()
            return Resumed(entry.step, entry, now - began, now - put_back_at, how, saved, checks, rejected)
        if doubtful:
            raise doubtful[0][1]
        if before is not None:
            self._start_over(before, rejected)
            return None
        self._team.funnel("choosing a checkpoint", lambda: None, lambda _: self._refuse_to_start_over(rejected))
        return None

    def _next(self, candidates: Iterator[Entry], number: int, began: float, _: list[None]) -> Entry | None:
        """The next one to try, as far as number and time allow.  Raises :class:`NoValidCheckpoint` when they do not."""
        entry = next(candidates, None)
        past_s = time.monotonic() - began
        if entry is not None and number and (number >= self.limits.most_entries or past_s > self.limits.most_s):
            if self.limits.start_fresh:
                return None
            raise NoValidCheckpoint(
                f"{number} checkpoints could not be trusted within {past_s:.0f} s, and no more are tried",
                evidence=f"verify.most_entries is {self.limits.most_entries}, verify.most_s {self.limits.most_s:g}; "
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
        for name, batches in self.batches.items():
            place(batches, name, 0, {})

    def _from_copies(self, began: float) -> Resumed | None:
        """From copies in the nodes' memory, where every rank has one that is newer than every shared checkpoint."""
        if self.copies is None:
            return None
        tier = self.copies.tier
        shared = self._team.funnel("looking for a checkpoint", lambda: None, lambda _: self._store.latest())
        while (entry := tier.find(newer_than=shared)) is not None:
            try:
                saved, checks, how, put_back_at = self._try(_Local(tier, entry, self._team))
            except Fenced:
                raise
            except CheckpointError as error:
                self.copies.failed(entry.step, str(error))
                self._team.agree("refusing the local copies", functools.partial(tier.refuse, entry, error.what))
                continue
            self._team.agree("accepting the local copies", functools.partial(tier.accept, entry, self._by))
            now = time.monotonic()
            return Resumed(entry.step, entry, now - began, now - put_back_at, how, saved, checks, tier="local")
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
            _, checks, _, put_back_at = self._try(_Unmarked(self._store, entry, self._world, self._team), checks)
        except (CorruptCheckpoint, CheckFailed, RestoreFailed) as error:
            reason, put_back_at = error.what, time.monotonic()
        now = time.monotonic()
        return checks, reason, {"load_s": round(put_back_at - began, 6), "verify_s": round(now - put_back_at, 6)}

    def _try(
        self, source: _Shared | _Local, checks: list[Check] | None = None
    ) -> tuple[dict[str, Any], list[Check], str, float]:
        """Everything from one entry.  What it raises says who is to blame."""
        began = time.monotonic()
        registry, team, entry = self._registry, self._team, source.entry

        def prepare() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            extra, tensors = source.peek()
            saved = _own_part(extra, entry)
            state_digest.require_declared(saved.get("digest"), tensors, entry.name)
            layout = Layout(tensors)
            room = registry.template(saved, layout)
            for key in layout.under("probe/"):
                room[key] = torch.zeros(layout.shape(key), dtype=layout.dtype(key))
            return saved, room

        saved, room = team.agree("comparing the checkpoint with the model", prepare)
        source.begin()
        loaded = source.load(room)
        self._measured("load", began)
        began = time.monotonic()

        def restore() -> None:
            try:
                registry.restore(saved, room)
            except (ResilienceError, MemoryError):
                raise
            except Exception as error:
                raise RestoreFailed(
                    f"An object refused its state from {entry.name}: {type(error).__name__}: {error}",
                    evidence="the bytes are those that were saved",
                    remedy="look at what changed in the classes of the registered objects since then",
                ) from error
            for name, batches in self.batches.items():
                place(batches, name, entry.step, saved["data"])

        team.agree(f"putting {entry.name} back", restore)
        self._measured("restore", began)
        put_back_at = time.monotonic()
        probe_batch = tuple(room[key].to(_device(registry)) for key in sorted(room, key=_number) if key.startswith("probe/"))
        restored = Restored(
            registry, saved, entry.step, entry.world, self._world.size, self.probe, probe_batch,
            entry.name, entry.attempt, self.own, self.batches, self.limits, team, room,
        )  # fmt: skip
        checks = [] if checks is None else checks
        for ask in (*CHECKS, *self.extra_checks):
            team.agree(f"checking {entry.name}", functools.partial(_judge, ask, restored, checks))
        self._measured("verify", put_back_at)
        how = "exact" if loaded.per_rank is not None else "derived"
        mine = loaded.per_rank
        rank, size = self._world.rank, self._world.size

        def roll() -> None:
            if mine is None:
                rng.reseed(rng.derive(self._seed, entry.step, rank, size))
                return
            try:
                rng.restore(mine["rng"])
            except Exception as error:
                raise CheckFailed(f"rng: the generators refused their state: {type(error).__name__}: {error}") from error
            if "rng_of" in mine:
                odd = rng.disagreement(mine["rng_of"], entry.step, rank, size)
                if odd is not None:
                    _must_hold(equal(f"rng: {odd[0]}", odd[1], odd[2]))

        team.agree("restoring the random generators", roll)
        if how == "exact" and self.recompute is not None and "loss" in self.logged.get(entry.step + 1, {}):
            checks.append(team.agree(f"taking the step after {entry.name} once more", lambda: self._replay(entry.step)))
        return saved, checks, how, put_back_at

    def _replay(self, step: int) -> Check:
        """The loss of the next step against what the log says of it, from when it was taken before."""
        assert self.recompute is not None
        measured = self.recompute.mean_loss(step, self._registry.models.values())
        check = close("loss of the next batch", self.logged[step + 1]["loss"], measured, self.limits.replay)
        _must_hold(check)
        return check

    def _quarantine(self, entry: Entry, reason: str) -> None:
        log.error("checkpoint %s is not used any more: %s", entry.name, reason)
        self._lead("quarantining", lambda: self._store.quarantine(entry, reason, self._by))
        if self._team.leads:
            self._link.send("checkpoint_quarantined", step=entry.step, name=entry.name, reason=reason)

    def _lead(self, stage: str, work: Any) -> None:
        self._team.funnel(stage, lambda: None, lambda _: work())

    def _measured(self, name: str, began: float) -> None:
        if self._team.leads:
            self._link.send("phase_done", name=name, seconds=round(time.monotonic() - began, 6))


@dataclass(frozen=True)
class _Shared:
    """A checkpoint that all ranks read together."""

    store: CheckpointStore
    entry: Entry
    world: World
    team: Team

    def peek(self) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]:
        # Every rank reads the manifest whose digest rank 0 has chosen: so all see the same one, or say that they do not.
        manifest = self.store.manifest(self.entry)
        return manifest.extra, manifest.tensors

    def begin(self) -> None:
        self.team.funnel(
            "marking the checkpoint as attempted", lambda: None, lambda _: self.store.mark_attempted(self.entry) and None
        )

    def load(self, room: dict[str, torch.Tensor]) -> dcp.LoadResult:
        return dcp.load(self.store, self.entry, room, process_group=self.world.checkpoint)


class _Unmarked(_Shared):
    """The same, without a trace: for a look by somebody who does not train on."""

    def begin(self) -> None:
        """Leave the marks as they are."""


@dataclass(frozen=True)
class _Local:
    """One rank's copy of a step of which all ranks have one."""

    tier: LocalTier
    entry: Entry
    team: Team

    def peek(self) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]:
        return self.tier.peek(self.entry)

    def begin(self) -> None:
        self.team.agree("marking the local copies as attempted", lambda: self.tier.begin(self.entry))

    def load(self, room: dict[str, torch.Tensor]) -> dcp.LoadResult:
        return self.tier.read(self.entry, room)


def place(batches: Source, name: str, step: int, data: dict[str, Any]) -> None:
    """Put one stream of batches where the checkpoint says; one that the checkpoint does not know, where arithmetic says."""
    state = data.get(name)
    if state is None:
        state = batches.state_at(step)
    batches.seek(step, state)


def _judge(ask: CheckFn, restored: Restored, into: list[Check]) -> None:
    found = list(ask(restored))
    into += found
    failed = [str(check) for check in found if check.verdict is Verdict.FAILED]
    if failed:
        raise CheckFailed("; ".join(failed[:MOST_REASONS]), evidence="measured after everything was put back")


def _must_hold(check: Check) -> None:
    if check.verdict is Verdict.FAILED:
        raise CheckFailed(str(check), evidence="measured after everything was put back")


def _own_part(extra: dict[str, Any], entry: Entry) -> dict[str, Any]:
    saved = extra.get("training")
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"Checkpoint {entry.name} was not taken by a Run",
            evidence="its manifest has no part called 'training'",
            remedy="load it with slurm_resilience.checkpoint.dcp.load, or give this run a checkpoint directory of its own",
        )
    if int(saved.get("v", 0)) > FORMAT_VERSION:
        raise FormatError(
            f"Checkpoint {entry.name} was taken by a newer release",
            evidence=f"its version is {saved['v']}, we know up to {FORMAT_VERSION}",
            remedy="install that release of slurm-resilience",
        )
    return saved


def _number(key: str) -> int:
    tail = key.rpartition("/")[2]
    return int(tail) if tail.isdigit() else 0


def _device(registry: Registry) -> torch.device:
    for model in registry.models.values():
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")
