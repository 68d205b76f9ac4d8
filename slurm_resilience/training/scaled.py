"""The explicit other choice: the batch follows the world, and the learning rate follows the batch.

Schedulers read the rate that they wrote, and a checkpoint must mean the same on any world, so the scheduled rate stays where
it is; only while an optimizer makes its update is the rate another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slurm_resilience.errors import ConfigError


class ScaledRate:
    """``factor`` times the scheduled learning rate in every update."""

    def __init__(self, rule: str, factor: float, global_batch: int) -> None:
        self.rule, self.factor, self.global_batch = rule, factor, global_batch
        self._scheduled: dict[int, list[Any]] = {}

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any], rule: str | None) -> ScaledRate | None:
        """What the plan says; None when nobody asked for it.  Raises :class:`ConfigError` for a plan that does not say it."""
        if rule is None:
            return None
        if not plan.get("global_batch") or "lr_factor" not in plan:
            raise ConfigError(
                f"keep_accumulation={rule} was asked for, but the plan has no batch to scale",
                evidence=f"the plan says global_batch={plan.get('global_batch')}, lr_factor={plan.get('lr_factor')}",
                remedy="start the run by slurm-resilience run or submit_resilient, with a global_batch",
            )
        return cls(rule, float(plan["lr_factor"]), int(plan["global_batch"]))

    def facts(self) -> dict[str, Any]:
        """What a reader of the events has to know."""
        return {"rule": self.rule, "factor": self.factor, "global_batch": self.global_batch}

    def require(self, optimizers: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
        """Raise :class:`ConfigError` when the batch or the rate would stay as it is, without a word."""
        missing = [
            word
            for word, there in (("no optimizer is registered", optimizers), ("neither run.batches() nor run.loader()", sources))
            if not there
        ]
        if missing:
            raise ConfigError(
                f"keep_accumulation={self.rule} has nothing to act on",
                evidence="; ".join(missing) + " gives the script its samples" * (not sources),
                remedy="register the optimizer, take the samples from the run, or leave keep_accumulation out",
            )

    def drive(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """From now on these optimizers update with the scaled rate."""
        if self.factor != 1.0:
            for optimizer in optimizers.values():
                optimizer.register_step_pre_hook(self._before)
                optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._after(optimizer)  # an update that raised has left the scaled rate behind
        kept = self._scheduled[id(optimizer)] = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            kept.append(rate.clone() if isinstance(rate, torch.Tensor) else rate)
            _set(group, None if rate is None else rate * self.factor)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._scheduled.pop(id(optimizer), ()), strict=False):
            _set(group, rate)


def _set(group: dict[str, Any], rate: Any) -> None:
    """A rate in a tensor keeps its tensor: compiled steps hold on to it."""
    if isinstance(group.get("lr"), torch.Tensor):
        group["lr"].copy_(rate)
    elif rate is not None:
        group["lr"] = rate
