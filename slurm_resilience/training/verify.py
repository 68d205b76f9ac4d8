"""Is the restored run the run that was saved?  Asked before the first step, cheap questions first.

Each check has a name, what was expected, what was measured, a tolerance and a verdict.  "Inconclusive" is a verdict of its own:
it neither passes nor condemns an entry.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.training import optimizer as optimizers
from slurm_resilience.training import state_digest, witness
from slurm_resilience.training.as_loaded import AsLoaded
from slurm_resilience.training.data import Source
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.refused import RestoreFailed
from slurm_resilience.training.state import Registry
from slurm_resilience.training.state_digest import Row
from slurm_resilience.training.verifying import Verifying


class Verdict(str, enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """One question to a restored run and its answer."""

    name: str
    expected: Any
    measured: Any
    tolerance: float | None
    verdict: Verdict

    def __str__(self) -> str:
        within = f" within {self.tolerance:g}" if self.tolerance else ""
        return f"{self.name}: expected {self.expected}{within}, measured {self.measured}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


@dataclass(frozen=True)
class OwnRun:
    """Who resumes.  ``relatives``: runs whose checkpoints this one has begun from; ``trained``: its log has steps already."""

    run_id: str
    attempt: int
    relatives: frozenset[str] = frozenset()
    trained: bool = False


@dataclass(frozen=True)
class Restored:
    """What a check may look at: the objects as they are now, and what the checkpoint and its entry say they should be."""

    registry: Registry
    saved: dict[str, Any]
    entry_step: int
    entry_world: int
    world: int
    probe: Probe | None
    probe_batch: tuple[torch.Tensor, ...]
    entry_name: str = ""
    entry_attempt: int = 0
    run: OwnRun | None = None
    batches: Mapping[str, Source] = field(default_factory=dict)
    limits: Verifying = field(default_factory=Verifying)
    team: Team = field(default_factory=Team.alone)
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: AsLoaded | None = None

    @functools.cached_property
    def held(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, by its name in the checkpoint, as the objects hold it; built once."""
        return self.registry.held(self.given, self.names)

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """``id(parameter)`` → name."""
        return self.registry.names()

    def rows(self) -> list[Row]:
        """The sums of every tensor of the state, as the objects hold it."""
        return state_digest.part_of(self.held) if self.loaded is None else self.loaded.now(self.held)


CheckFn = Callable[[Restored], Iterator[Check]]
"""All ranks call it alike.  One that fails ends the entry, so cheap ones come first."""


def equal(name: str, expected: Any, measured: Any) -> Check:
    """A check that knows no tolerance."""
    return Check(name, expected, measured, None, Verdict.PASSED if expected == measured else Verdict.FAILED)


def close(name: str, expected: float, measured: float, tolerance: float) -> Check:
    """A check of two numbers, relative to the expected one."""
    fine = math.isfinite(measured) and abs(measured - expected) <= tolerance * max(abs(expected), 1e-12)
    return Check(name, expected, measured, tolerance, Verdict.PASSED if fine else Verdict.FAILED)


def unsure(name: str, expected: Any, measured: Any) -> Check:
    """A check that can tell neither way."""
    return Check(name, expected, measured, None, Verdict.INCONCLUSIVE)


def _step(restored: Restored) -> Iterator[Check]:
    yield equal("step", restored.entry_step, restored.saved["counters"]["step"])
    named = witness.named(restored.entry_name)
    if named is not None:
        yield equal("step of its name", named[0], restored.entry_step)
    history = restored.saved.get("history")
    if history:
        yield equal("step that its history ends at", int(history[-1][0]), restored.entry_step)
    said = restored.saved.get("witness")
    if said is not None:
        yield equal("step of its second account", said["step"], restored.entry_step)


def _whose(restored: Restored) -> Iterator[Check]:
    """It is this run's own state, of an attempt that has been; or, where the run has not trained yet, one to begin from."""
    run, said = restored.run, restored.saved.get("witness")
    if run is None or said is None:
        return
    if said["run"] not in run.relatives | {run.run_id}:
        check = equal if run.trained else unsure
        yield check("run", run.run_id, said["run"])
        return
    yield equal("attempt", said["attempt"], restored.entry_attempt)
    named = witness.named(restored.entry_name)
    if named is not None:
        yield equal("attempt of its name", named[1], restored.entry_attempt)
    if said["run"] == run.run_id and restored.entry_attempt > run.attempt:
        yield Check("attempt", f"at most {run.attempt}, which is this one", restored.entry_attempt, None, Verdict.FAILED)


def _second_account(restored: Restored) -> Iterator[Check]:
    """Groups, counts of updates, counts of schedulers and the place in the data are those that were noted beside the state."""
    said = restored.saved.get("witness")
    if said is None:
        return
    for what, then, now in witness.disagreements(said, restored.registry, restored.batches, restored.names):
        yield equal(what, then, now)
    for label, thing in restored.registry.schedulers.items():
        noted = said["schedules"].get(label, {})
        real = witness.rates(thing)
        if noted.get("is_rate"):
            yield equal(f"learning rate that {label} answers for", real, last_lr(thing))
        rule = witness.formula(thing) if noted.get("is_formula") else None
        if rule is not None:
            # A lambda is not in the checkpoint: it is the user's to change, when a run is made longer for example.
            own = isinstance(thing, torch.optim.lr_scheduler.LambdaLR)
            fits = witness.alike(rule, real)
            verdict = Verdict.PASSED if fits else Verdict.INCONCLUSIVE if own else Verdict.FAILED
            yield Check(f"learning rate by the formula of {label}", rule, real, witness.FORMULA_REL, verdict)


def _data(restored: Restored) -> Iterator[Check]:
    step = restored.entry_step
    for name, state in restored.saved["data"].items():
        yield equal(f"data position of {name}", step, state["step"])


def _learning_rate(restored: Restored) -> Iterator[Check]:
    """The groups hold what they held when saved, whatever their order, and so does the scheduler's own answer."""
    for label, one in restored.registry.optimizers.items():
        yield equal(f"learning rate of {label}", sorted(restored.saved["lr"][label]), sorted(optimizers.learning_rates(one)))
    for label, thing in restored.registry.schedulers.items():
        yield equal(f"last learning rate of {label}", restored.saved["last_lr"][label], last_lr(thing))


def _probe(restored: Restored) -> Iterator[Check]:
    recorded = restored.saved.get("probe")
    if restored.probe is None or recorded is None:
        return
    moved = restored.world != restored.entry_world
    tolerance = restored.probe.tolerance
    unsure = moved and tolerance is None
    measured = restored.probe.measure(restored.registry.models.values(), restored.probe_batch, look=unsure)
    if tolerance is None:
        tolerance = restored.limits.probe_same_world
        if moved:
            low = bool(recorded.get("low_precision")) or restored.probe.low_precision
            tolerance = restored.limits.probe_low_precision if low else restored.limits.probe_other_world
    expected = float(recorded["loss"])
    if not math.isfinite(expected):
        yield Check("probe loss", expected, measured, tolerance, Verdict.FAILED)
    else:
        yield close("probe loss", expected, measured, tolerance)


ALONE: tuple[CheckFn, ...] = (_step, _whose, _data, _learning_rate, _second_account)
"""What each rank answers without the others."""


def _state(restored: Restored) -> Iterator[Check]:
    """What each rank answers alone, and what all of them hold together: the bits of every tensor, in one exchange."""

    def ask() -> tuple[list[Check], list[Check], list[Row]]:
        rows = restored.rows()
        alone = [check for question in ALONE for check in question(restored)]
        return alone, [*_own_copy(restored, rows), _finite(restored, rows)], rows

    def judge(everyone: list[tuple[list[Check], list[Check], list[Row]]]) -> tuple[list[Check], dict[str, str]]:
        recorded = (restored.saved.get("digest") or {}).get("tensors")
        joined = state_digest.judge([rows for _, _, rows in everyone], recorded)
        odd = [str(one) for one in joined.differing]
        together = [equal("copies that differ", [], odd[:5])]
        wrong = {} if recorded is None else state_digest.differences(recorded, joined.tensors)
        if recorded is None and "own" not in (restored.saved.get("digest") or {}):
            together.append(Check("state digest", "none was kept", "not compared", None, Verdict.INCONCLUSIVE))
        elif recorded is not None:
            together.append(equal_state("state digest", len(recorded), wrong))
        alone = [check for checks, _, _ in everyone for check in checks]
        later = [check for _, checks, _ in everyone for check in checks]
        return [*_once(alone), *together, *_once(later)], wrong

    checks, wrong = restored.team.funnel("comparing the state", ask, judge)
    if wrong and all(check.verdict is not Verdict.FAILED or check.name == "state digest" for check in checks):
        _blame_the_object(restored, wrong)
    yield from checks


def _once(checks: list[Check]) -> list[Check]:
    """The answers of all ranks without repetition."""
    by_name: dict[str, list[Check]] = {}
    for check in checks:
        known = by_name.setdefault(check.name, [])
        if check not in known:
            known.append(check)
    return [check for known in by_name.values() for check in known]


def equal_state(name: str, count: int, wrong: Mapping[str, str]) -> Check:
    """Whether no tensor differs; the first few that do are named."""
    return Check(
        name,
        f"{count} tensors as they were saved",
        state_digest.sentence(wrong) or f"{count} tensors as they were saved",
        None,
        Verdict.FAILED if wrong else Verdict.PASSED,
    )


def _own_copy(restored: Restored, rows: list[Row]) -> Iterator[Check]:
    """Of a copy that this rank alone has taken and loads: its digest is about this rank's part only."""
    recorded = (restored.saved.get("digest") or {}).get("own")
    if recorded is not None:
        wrong = state_digest.differences(recorded, state_digest.by_key(rows))
        yield equal_state(f"state digest of rank {restored.team.rank}'s own copy", len(recorded), wrong)


def _finite(restored: Restored, rows: list[Row]) -> Check:
    """No parameter and no optimizer moment is NaN or infinite.  Buffers may be: masks hold -inf by right."""
    odd = [row.key for row in rows if not row.sums.finite]
    parameters, moments = restored.registry.trained() if odd else (set(), ())
    bad = [key for key in odd if key in parameters or key.startswith(moments)]
    for label, one in restored.registry.optimizers.items():
        numbers = ((word, value) for state in one.state.values() for word, value in state.items() if isinstance(value, float))
        bad += [f"{label}.{word}" for word, value in numbers if not math.isfinite(value)]
    return equal("tensors that are not finite", [], bad[:5])


def _blame_the_object(restored: Restored, wrong: Mapping[str, str]) -> None:
    """Raise :class:`RestoreFailed` when what was loaded is right and the object that took it holds something else."""
    given = restored.loaded
    parts = restored.team.funnel("comparing what was loaded", lambda: given.of(wrong) if given else [], lambda parts: parts)
    recorded = {key: restored.saved["digest"]["tensors"].get(key) for key in wrong}
    if state_digest.join(parts).tensors == recorded:
        raise RestoreFailed(
            f"Objects hold other state than they were given: {state_digest.sentence(wrong)}",
            evidence="what was loaded has the digest that was recorded",
            remedy="look at what load_state_dict() of these objects does with it",
        )


CHECKS: tuple[CheckFn, ...] = (_state, _probe)


def last_lr(scheduler: Any) -> list[float]:
    """What the scheduler itself says, as plain numbers."""
    return [float(value) for value in scheduler.get_last_lr()]
