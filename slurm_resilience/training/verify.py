"""Is the restored run the run that was saved?  Asked before the first step, cheap questions first.

Each check has a name, what was expected, what was measured, a tolerance and a verdict.  "Inconclusive" is a verdict of its own:
it neither passes nor condemns an entry.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.training import optimizer as optimizers
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.state import Registry

# The probe's forward pass repeats the same kernels on the same numbers, so on the same world the loss is the same but for the
# choice of kernels by memory alignment.  On another one, sums of shards may be taken in another order.  Source: DESIGN
# promise "1e-5 fp32"; a wrong weight moves the loss by far more than either.
SAME_WORLD_REL = 1e-6
OTHER_WORLD_REL = 1e-4


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
class Restored:
    """What a check may look at: the objects as they are now, and what the checkpoint and its entry say they should be."""

    registry: Registry
    saved: dict[str, Any]
    entry_step: int
    entry_world: int
    world: int
    probe: Probe | None
    probe_batch: tuple[torch.Tensor, ...]


CheckFn = Callable[[Restored], Iterator[Check]]
"""All ranks call it alike.  One that fails ends the entry, so cheap ones come first."""


def equal(name: str, expected: Any, measured: Any) -> Check:
    """A check that knows no tolerance."""
    return Check(name, expected, measured, None, Verdict.PASSED if expected == measured else Verdict.FAILED)


def close(name: str, expected: float, measured: float, tolerance: float) -> Check:
    """A check of two numbers, relative to the expected one."""
    fine = math.isfinite(measured) and abs(measured - expected) <= tolerance * max(abs(expected), 1e-12)
    return Check(name, expected, measured, tolerance, Verdict.PASSED if fine else Verdict.FAILED)


def _step(restored: Restored) -> Iterator[Check]:
    yield equal("step", restored.entry_step, restored.saved["counters"]["step"])


def _data(restored: Restored) -> Iterator[Check]:
    step = restored.entry_step
    for name, state in restored.saved["data"].items():
        yield equal(f"data position of {name}", step, state["step"])


def _learning_rate(restored: Restored) -> Iterator[Check]:
    """The groups hold what they held when saved, and so does the scheduler's own answer."""
    for label, one in restored.registry.optimizers.items():
        yield equal(f"learning rate of {label}", restored.saved["lr"][label], optimizers.learning_rates(one))
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
        tolerance = SAME_WORLD_REL if restored.world == restored.entry_world else OTHER_WORLD_REL
    expected = float(recorded["loss"])
    if not math.isfinite(expected):
        yield Check("probe loss", expected, measured, tolerance, Verdict.FAILED)
    else:
        yield close("probe loss", expected, measured, tolerance)


def _own(restored: Restored) -> Iterator[Check]:
    """What each rank answers without the others, in one go."""
    for ask in (_step, _data, _learning_rate, _finite):
        yield from ask(restored)


CHECKS: tuple[CheckFn, ...] = (_own, _probe)


def last_lr(scheduler: Any) -> list[float]:
    """What the scheduler itself says, as plain numbers."""
    return [float(value) for value in scheduler.get_last_lr()]


def _is_finite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, float) or math.isfinite(value)
    local = value.to_local() if isinstance(value, DTensor) else value
    return not local.is_floating_point() or bool(torch.isfinite(local.detach()).all())
