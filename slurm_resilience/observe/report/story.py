"""What a report tells: a run's attempts, incidents, curve, checkpoints and time, read from its folder in bounded memory."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience.errors import ConfigError
from slurm_resilience.observe.accounts import Account, account
from slurm_resilience.observe.events import FILE_NAME, read_for_standing
from slurm_resilience.observe.failures import word_of
from slurm_resilience.observe.incidents import Incident, faults, steps_done_again
from slurm_resilience.observe.standing import Observer, Standing, look_for_supervisor

METRICS = "metrics.jsonl"
# A page wider than this many points shows no more of a curve.
_POINTS = 2000
# Of all attempts together: there may be thousands.
_POINTS_IN_ALL = 100_000
# What every checkpoint root has; nothing above this floor may be asked.
_OF_A_ROOT = "fence"
_VERIFIED = ".verified.json"  # in a checkpoint's folder, once a load has found it to be good


@dataclass
class Span:
    """Ranks on nodes, from launch to end; ``first_step_at`` None where it never trained."""

    number: int
    restart: int
    nodes: tuple[str, ...]
    world: int
    start: float
    end: float
    first_step_at: float | None = None
    from_step: int = 0
    end_cause: str = ""


@dataclass(frozen=True)
class Saved:
    """A save that ended: ``state`` is committed, verified, removed (it is not there any more), failed or quarantined."""

    t: float
    step: int | None
    name: str
    state: str
    seconds: float | None = None
    bytes: int | None = None
    why: str = ""


@dataclass
class Curve:
    """The losses that one attempt reported, thinned evenly; ``kept_to``: steps beyond it were done again by a later attempt."""

    attempt: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kept_to: float = math.inf
    stride: int = 1
    seen: int = 0

    def add(self, step: int, loss: float) -> None:
        """One more point, unless it falls between two that are shown."""
        if self.seen % self.stride == 0:
            self.steps.append(step)
            self.losses.append(loss)
            if len(self.steps) >= 2 * _POINTS:
                self.halve()
        self.seen += 1

    def halve(self) -> None:
        """Keep every other point."""
        self.steps, self.losses, self.stride = self.steps[::2], self.losses[::2], self.stride * 2


@dataclass(frozen=True)
class Recovery:
    """How long coming back took for one cause, in seconds."""

    cause: str
    count: int
    recovered: int
    median: float | None
    p95: float | None
    longest: float | None


@dataclass(frozen=True)
class Story:
    """All that the page needs."""

    standing: Standing
    account: Account
    start: float
    end: float
    attempts: tuple[Span, ...]
    curves: tuple[Curve, ...]
    saves: tuple[Saved, ...]
    recoveries: tuple[Recovery, ...]

    @property
    def incidents(self) -> Sequence[Incident]:
        return self.standing.incidents

    @property
    def steps_lost(self) -> int:
        """Steps that had to be done again."""
        return steps_done_again(self.incidents)


def read(run_dir: str | os.PathLike[str]) -> Story:
    """The story of the run in that folder.  Raises :class:`ConfigError` for a folder without events."""
    folder = Path(run_dir)
    facts = list(read_for_standing(folder))
    if not facts:
        raise ConfigError(
            f"There is nothing to report on {folder}",
            evidence=f"{folder / FILE_NAME} is missing or holds no event",
            remedy="give the folder that `slurm-resilience run` names in its first line",
        )
    observer = Observer()
    for fact in facts:
        observer.apply(fact)
    look_for_supervisor(observer.standing, folder, now=time.time())
    start, end = float(facts[0]["t"]), max(float(fact["t"]) for fact in facts)
    return Story(
        observer.standing,
        account(facts),
        start,
        end,
        tuple(_attempts(facts, end)),
        tuple(curves(folder / METRICS)),
        tuple(_still_there(_saves(facts), folder)),
        tuple(recoveries(observer.standing.incidents)),
    )


def _attempts(facts: Iterable[Mapping[str, Any]], end: float) -> list[Span]:
    out: list[Span] = []
    for fact in facts:
        t, name = float(fact["t"]), fact["event"]
        if name in ("allocation_started", "attempt_started", "run_completed", "run_failed") and out and out[-1].end == end:
            out[-1].end = t
            out[-1].end_cause = out[-1].end_cause or ("finished" if name == "run_completed" else "")
        if name == "attempt_started":
            nodes = tuple(map(str, fact.get("nodes") or ()))
            out.append(Span(int(fact["attempt"]), int(fact.get("restart", 0)), nodes, int(fact.get("world") or 0), t, end))
        elif not out or fact.get("attempt") != out[-1].number:
            continue
        elif name == "first_step" and out[-1].first_step_at is None:
            out[-1].first_step_at = t
        elif name == "resumed":
            out[-1].from_step = int(fact.get("step") or 0)
        elif name == "attempt_stopped":
            out[-1].end, out[-1].end_cause = t, word_of(fact)
    return out


def _saves(facts: Iterable[Mapping[str, Any]]) -> list[Saved]:
    out: list[Saved] = []
    for fact in facts:
        t, step, name = float(fact["t"]), fact.get("step"), str(fact.get("name", ""))
        if fact["event"] == "checkpoint_committed":
            if out and name and out[-1].name == name and out[-1].state == "committed":
                continue  # told again, by agents that did not know whether the supervisor before had heard it
            out.append(Saved(t, step, name, "committed", fact.get("seconds"), fact.get("bytes")))
        elif fact["event"] == "checkpoint_failed":
            out.append(Saved(t, step, name, "failed", why=str(fact.get("error", ""))))
        elif fact["event"] == "checkpoint_quarantined":
            out.append(Saved(t, step, name, "quarantined", why=str(fact.get("reason", ""))))
    return out


def _still_there(saves: Iterable[Saved], folder: Path) -> Iterator[Saved]:
    """What the checkpoint root says of them: retention tells no fact, and neither does a load that found one to be good.

    Where the root cannot be listed nobody knows, and what was told stands.
    """
    try:
        run = read_json(folder / "run.json")
    except (ValueError, OSError):
        run = None
    config = run.get("config") if isinstance(run, dict) else None
    chosen = config.get("checkpoint") if isinstance(config, dict) else None
    given = chosen.get("dir") if isinstance(chosen, dict) else None
    root = Path(given) if isinstance(given, str) and given else folder / "checkpoints"
    try:
        there = set(os.listdir(root))
    except (OSError, ValueError):
        there = set()
    if _OF_A_ROOT not in there:  # the script has chosen another place, or it is gone as a whole
        yield from saves
        return
    for saved in saves:
        if saved.state != "committed" or not saved.name:
            yield saved
        elif saved.name not in there:
            yield replace(saved, state="removed")
        else:
            verified = os.path.exists(root / saved.name / _VERIFIED)
            yield replace(saved, state="verified") if verified else saved


def curves(path: Path) -> list[Curve]:
    """The loss of each attempt, in the order of the file.  Lines that are torn or hold no finite loss are passed over."""
    out: list[Curve] = []
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return out
    with file:
        for raw in file:
            try:
                line = json.loads(raw)
                step, attempt, loss = int(line["step"]), int(line["attempt"]), float(line["loss"])
            except (ValueError, KeyError, TypeError):
                continue
            if not math.isfinite(loss):
                continue
            if not out or out[-1].attempt != attempt:
                for earlier in out:  # what that attempt begins with, the ones before it did in vain
                    earlier.kept_to = min(earlier.kept_to, step - 1)
                if sum(len(earlier.steps) for earlier in out) > _POINTS_IN_ALL:
                    for earlier in out:
                        earlier.halve()
                out.append(Curve(attempt))
            out[-1].add(step, loss)
    return out


def recoveries(incidents: Sequence[Incident]) -> list[Recovery]:
    """Per cause, the most frequent first: how many, how many came back, and median, 95th percentile and longest time."""
    by_cause: dict[str, list[Incident]] = {}
    for incident in faults(incidents):
        by_cause.setdefault(incident.cause, []).append(incident)
    out = []
    for cause, mine in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        times = sorted(incident.seconds for incident in mine if incident.seconds is not None)
        p95 = times[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)] if times else None
        out.append(
            Recovery(
                cause,
                len(mine),
                sum(incident.recovered for incident in mine),
                statistics.median(times) if times else None,
                p95,
                times[-1] if times else None,
            )
        )
    return out
