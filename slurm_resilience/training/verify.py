"""Is the restored run the run that was saved?  Asked before the first step, cheap questions first.

Each check has a name, what was expected, what was measured, a tolerance and a verdict.  "Inconclusive" is a verdict of its own:
it neither passes nor condemns an entry.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.training import optimizer as optimizers
from slurm_resilience.training import witness
from slurm_resilience.training.data import Source
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.state import Registry
from slurm_resilience.training.verifying import Verifying

PIECE = 1 << 20  # elements that are looked at together


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
    for what, then, now in witness.disagreements(said, restored.registry, restored.batches):
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


def _finite(restored: Restored) -> Iterator[Check]:
    """No parameter and no optimizer moment is NaN or infinite.  Buffers may be: masks hold -inf by right."""
    bad = []
    for label, model in restored.registry.models.items():
        bad += [f"{label}.{name}" for name, value in model.named_parameters() if not _is_finite(value)]
    for label, one in restored.registry.optimizers.items():
        bad += [f"{label}.{word}" for state in one.state.values() for word, value in state.items() if not _is_finite(value)]
    yield equal("tensors that are not finite", [], bad[:5])


def _probe(restored: Restored) -> Iterator[Check]:
    recorded = restored.saved.get("probe")
    if restored.probe is None or recorded is None:
        return
    measured = restored.probe.measure(restored.registry.models.values(), restored.probe_batch)
    tolerance = restored.probe.tolerance
    if tolerance is None:
        tolerance = restored.limits.probe_same_world
        if restored.world != restored.entry_world:
            low = bool(recorded.get("low_precision")) or restored.probe.low_precision
            tolerance = restored.limits.probe_low_precision if low else restored.limits.probe_other_world
    expected = float(recorded["loss"])
    if not math.isfinite(expected):
        yield Check("probe loss", expected, measured, tolerance, Verdict.FAILED)
    else:
        yield close("probe loss", expected, measured, tolerance)


def _own(restored: Restored) -> Iterator[Check]:
    """What each rank answers without the others, in one go."""
    for ask in (_step, _whose, _data, _learning_rate, _second_account, _finite):
        yield from ask(restored)


CHECKS: tuple[CheckFn, ...] = (_own, _probe)


def last_lr(scheduler: Any) -> list[float]:
    """What the scheduler itself says, as plain numbers."""
    return [float(value) for value in scheduler.get_last_lr()]


def _is_finite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, float) or math.isfinite(value)
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    return not local.is_floating_point() or all(bool(torch.isfinite(piece).all()) for piece in _pieces(local))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of a tensor, none much larger than PIECE: looking at all of a large one at once needs twice its memory."""
    if tensor.numel() <= PIECE or not tensor.dim():
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE)
    else:
        for row in tensor.unbind():
            yield from _pieces(row)
