"""What a checkpoint says a second time, in another place and in another way, so that a wrong number contradicts a right one.

Each fact is taken from the live objects when the state is taken, and asked of the live objects again when it is back: an
optimizer's groups by the names of their parameters, its count of updates, a scheduler's count and its closed form, the place
in the data, whose state this is.  All of it is plain arithmetic over a few numbers, equal or not; nothing is within a tolerance
but the closed form, which rounds.

What this cannot see: numbers that were changed everywhere alike, and a schedule whose function the user has changed, which
is the user's right and said as inconclusive.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slurm_resilience.checkpoint import names
from slurm_resilience.errors import ConfigError
from slurm_resilience.training import optimizer as optimizers
from slurm_resilience.training.data import Source
from slurm_resilience.training.state import Registry

# A closed form and the recursion that torch steps through differ by rounding, once per step taken.
FORMULA_REL = 1e-6


def say(registry: Registry, batches: Mapping[str, Source], *, step: int, run_id: str, attempt: int) -> dict[str, Any]:
    """The second account of the state as it is now; plain JSON.  Changes nothing."""
    parameters = registry.names()
    return {
        "run": run_id,
        "attempt": attempt,
        "step": step,
        "groups": {label: groups(one, parameters) for label, one in registry.optimizers.items()},
        "updates": {label: updates(one) for label, one in registry.optimizers.items()},
        "schedules": {label: _schedule(thing) for label, thing in registry.schedulers.items()},
        "places": {name: [place(source.state(step)), _by_arithmetic(source, step)] for name, source in batches.items()},
    }


def groups(optimizer: torch.optim.Optimizer, parameters: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """The numbers of each group, under the first of its parameters' names: the order of groups may differ after a resume."""
    found = {}
    for at, group in enumerate(optimizer.param_groups):
        members = sorted(parameters.get(id(parameter), "") for parameter in group["params"])
        numbers = {name: _number(value) for name, value in group.items() if name != "params"}
        found[members[0] if members else f"#{at}"] = {name: value for name, value in numbers.items() if value is not None}
    return found


def updates(optimizer: torch.optim.Optimizer) -> list[float] | None:
    """Fewest and most updates that any parameter has had, by the optimizer's own count; None where it does not count."""
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    tensors = [one.detach() for one in counts if isinstance(one, torch.Tensor) and one.numel() == 1]
    numbers = [float(one) for one in tensors if one.device.type == "cpu"]
    elsewhere = [one.reshape(()).double() for one in tensors if one.device.type != "cpu"]
    numbers += torch.stack(elsewhere).tolist() if elsewhere else []  # fetched once
    numbers += [float(one) for one in counts if not isinstance(one, torch.Tensor)]
    return [min(numbers), max(numbers)] if numbers else None


def counts(scheduler: Any) -> list[int]:
    """How often a scheduler, and each one inside it, was stepped, as they say themselves."""
    found = [
        value
        for value in (getattr(scheduler, "last_epoch", None), getattr(scheduler, "_step_count", None))
        if value is not None
    ]
    for inner in getattr(scheduler, "_schedulers", ()):
        found += counts(inner)
    return [int(value) for value in found]


def formula(scheduler: Any) -> list[float] | None:
    """The learning rates that follow from the scheduler's count alone; None where torch knows no closed form."""
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    if callable(closed):
        return [float(value) for value in closed()]
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        pairs = zip(scheduler.lr_lambdas, scheduler.base_lrs, strict=True)
        return [float(base * rule(scheduler.last_epoch)) for rule, base in pairs]
    return None


def rates(scheduler: Any) -> list[float] | None:
    """The learning rates that the optimizer of a scheduler really has."""
    optimizer = getattr(scheduler, "optimizer", None)
    return optimizers.learning_rates(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None


def place(state: Mapping[str, Any]) -> list[int] | str:
    """One place in the data: epoch and samples consumed, or, for other sources, a digest of their record."""
    if "epoch" in state and "consumed" in state:
        return [int(state["epoch"]), int(state["consumed"])]
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=12).hexdigest()


def named(entry_name: str) -> tuple[int, int] | None:
    """Step and attempt that a checkpoint's directory is called after."""
    parsed = names.parse(entry_name)
    return (parsed.step, parsed.attempt) if parsed else None


def alike(one: list[float] | None, other: list[float] | None) -> bool:
    """Whether two lists of learning rates are the same but for rounding."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(math.isclose(a, b, rel_tol=FORMULA_REL, abs_tol=1e-15) for a, b in zip(one, other, strict=True))


def disagreements(
    said: dict[str, Any], registry: Registry, batches: Mapping[str, Source], parameters: Mapping[int, str]
) -> Iterator[tuple[str, Any, Any]]:
    """(what, as it was said, as it is) for every fact, equal ones too, cheap and exact ones only."""
    for label, one in registry.optimizers.items():
        then, now = said["groups"].get(label, {}), groups(one, parameters)
        # Not those that were not noted: another release of torch may have given groups more of them.
        for number in sorted({name for group in then.values() for name in group}):
            what = "learning rate" if number == "lr" else number
            before, after = ({at: group.get(number) for at, group in side.items()} for side in (then, now))
            yield f"{what} of {label}", before, after
        yield f"updates counted by {label}", said["updates"].get(label), updates(one)
    for label, thing in registry.schedulers.items():
        yield f"steps counted by {label}", said["schedules"].get(label, {}).get("counts"), counts(thing)
    for name, source in batches.items():
        if name in said["places"]:
            then, arithmetic = said["places"][name]
            yield f"samples consumed of {name}", then, place(source.state(said["step"]))
            if arithmetic:
                yield (
                    f"samples consumed of {name} by arithmetic",
                    place(source.state_at(said["step"])),
                    place(source.state(said["step"])),
                )


def _schedule(scheduler: Any) -> dict[str, Any]:
    last, rule, real = [float(value) for value in scheduler.get_last_lr()], formula(scheduler), rates(scheduler)
    return {"counts": counts(scheduler), "is_rate": last == real, "is_formula": alike(rule, real)}


def _by_arithmetic(source: Source, step: int) -> bool:
    try:
        return place(source.state_at(step)) == place(source.state(step))
    except ConfigError:
        return False


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist()
    if isinstance(value, (list, tuple)):
        return [_number(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else None
