"""How one checkpoint is put back and proved.

The order, in one place: everything is constructed → all ranks see the same entry → it is marked as attempted → tensors are
loaded → models → optimizers → schedulers → scaler and others (``Registry.restore`` says why) → counters → place in the
data → checks → random generators, last, because everything before may draw from them.  Every stage ends in a vote.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.errors import CheckpointError, FormatError, ResilienceError
from slurm_resilience.training import rng, state_digest
from slurm_resilience.training.as_loaded import AsLoaded
from slurm_resilience.training.data import Source
from slurm_resilience.training.entry_source import Local, Shared
from slurm_resilience.training.layout import Layout
from slurm_resilience.training.link import Link
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.recompute import Recompute
from slurm_resilience.training.refused import CheckFailed, RestoreFailed
from slurm_resilience.training.saving import FORMAT_VERSION
from slurm_resilience.training.state import Registry
from slurm_resilience.training.track import Rows
from slurm_resilience.training.verify import CHECKS, Check, CheckFn, OwnRun, Restored, Verdict, close, equal
from slurm_resilience.training.verifying import Verifying
from slurm_resilience.training.world import World

MOST_REASONS = 4


class Restorer:
    """Puts one entry at a time into the objects of one run."""

    def __init__(self, *, world: World, registry: Registry, link: Link, seed: int) -> None:
        self._world, self._team = world, world.team
        self._registry, self._link, self._seed = registry, link, seed
        self.batches: dict[str, Source] = {}
        self.probe: Probe | None = None
        self.extra_checks: tuple[CheckFn, ...] = ()
        self.own: OwnRun | None = None
        self.limits = Verifying()
        self.logged: Rows = {}
        self.recompute: Recompute | None = None

    def put_back(
        self, source: Shared | Local, checks: list[Check] | None = None
    ) -> tuple[dict[str, Any], list[Check], str, float]:
        """Everything from one entry: its saved part, the checks (also put into ``checks``), whether random numbers repeat
        exactly, and the seconds that checking took.  What it raises says who is to blame.  All ranks must come.
        """
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
            # Other data or another batch is the user's mistake: found before the entry is marked, it costs the entry nothing.
            for name, batches in self.batches.items():
                place(batches, name, entry.step, saved["data"])
            return saved, room

        saved, room = team.agree("comparing the checkpoint with the model", prepare)
        source.begin()
        prints = state_digest.watch(saved.get("digest"), room)
        loaded = source.load(room, prints)
        self._measured("load", began)
        began = time.monotonic()

        def restore() -> AsLoaded:
            as_loaded = AsLoaded(room, registry.writes_to, prints.sums)
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
            return as_loaded

        as_loaded = team.agree(f"putting {entry.name} back", restore)
        self._measured("restore", began)
        put_back_at = time.monotonic()
        probe_batch = tuple(room[key].to(_device(registry)) for key in sorted(filter(_of_probe, room), key=_number))
        restored = Restored(
            registry, saved, entry.step, entry.world, self._world.size, self.probe, probe_batch,
            entry.name, entry.attempt, self.own, self.batches, self.limits, team, room,
            as_loaded,
        )  # fmt: skip
        checks = [] if checks is None else checks
        for ask in (*CHECKS, *self.extra_checks):
            team.agree(f"checking {entry.name}", functools.partial(_judge, ask, restored, checks))
        verify_s = self._measured("verify", put_back_at)
        how = "exact" if loaded.per_rank is not None else "derived"
        mine = loaded.per_rank
        rank, size = self._world.rank, self._world.size

        rolled_at = 0.0

        def roll() -> None:
            nonlocal rolled_at
            if mine is None:
                rng.reseed(rng.derive(self._seed, entry.step, rank, size))
                rolled_at = time.monotonic()
                return
            try:
                state = rng.restore(mine["rng"])
            except Exception as error:
                raise CheckFailed(f"rng: the generators refused their state: {type(error).__name__}: {error}") from error
            rolled_at = time.monotonic()
            if "rng_of" in mine:
                odd = rng.disagreement(mine["rng_of"], entry.step, rank, size, mine["rng"], state)
                if odd is not None:
                    _must_hold(equal(f"rng: {odd[0]}", odd[1], odd[2]))

        team.agree("restoring the random generators", roll)
        if how == "exact" and self.recompute is not None and "loss" in self.logged.get(entry.step + 1, {}):
            checks.append(team.agree(f"taking the step after {entry.name} once more", lambda: self._replay(entry.step)))
        return saved, checks, how, verify_s + time.monotonic() - rolled_at

    def _replay(self, step: int) -> Check:
        """The loss of the next step against what the log says of it, from when it was taken before."""
        assert self.recompute is not None
        measured = self.recompute.mean_loss(step, self._registry.models.values())
        check = close("loss of the next batch", self.logged[step + 1]["loss"], measured, self.limits.replay)
        _must_hold(check)
        return check

    def _measured(self, name: str, began: float) -> float:
        seconds = time.monotonic() - began
        if self._team.leads:
            self._link.send("phase_done", name=name, seconds=round(seconds, 6))
        return seconds


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


def _of_probe(key: str) -> bool:
    return key.startswith("probe/")


def _number(key: str) -> int:
    tail = key.rpartition("/")[2]
    return int(tail) if tail.isdigit() else 0


def _device(registry: Registry) -> torch.device:
    for model in registry.models.values():
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")
