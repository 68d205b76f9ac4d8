"""What does a step cost this rank by itself, before it has to meet the others?

Ranks that train synchronously all take a step in the same time, because they wait for the slowest; so the time between two
meetings tells who that is.  Backward passes end in a meeting (gradients are reduced), so the clock starts when the
optimizer begins its step and stops at the end of the next forward pass, or at its beginning where the forward pass itself is a
meeting (sharded parameters, buffers that are broadcast).  Checkpoints, evaluations and compilation do not count, nor does
the time in collectives of ours.

Not seen: the backward pass, the forward pass of sharded models, what a GPU still does after the host has gone on, and
collectives of the user's own between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from slurm_resilience.training.link import Link
from slurm_resilience.training.world import World

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


class OwnTime:
    """Sits in hooks of optimizers and models; tells the link one number a step."""

    def __init__(self, link: Link, world: World) -> None:
        self._link = link
        self._world = world
        self._since: float | None = None
        self._waited_s = 0.0
        self._hooks: list[Any] = []

    def install(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._met()))
        for model in models:
            if meets_in_forward(model):
                self._hooks.append(model.register_forward_pre_hook(lambda *_: self._meets(), prepend=True))
            else:
                self._hooks.append(model.register_forward_hook(lambda *_: self._meets()))

    def remove(self) -> None:
        """Take the hooks out again."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def skip(self) -> None:
        """Something else came in between: this step is not measured."""
        self._since = None

    def _met(self) -> None:
        self._since, self._waited_s = time.perf_counter(), self._world.waited_s

    def _meets(self) -> None:
        if self._since is not None:
            since, self._since = self._since, None
            self._link.own(max(0.0, time.perf_counter() - since - (self._world.waited_s - self._waited_s)))


def meets_in_forward(model: torch.nn.Module) -> bool:
    """Whether ranks wait for each other in its forward pass.  By name, since importing FSDP takes seconds."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if kinds.intersection(_SHARDED) or any(
        kind.__name__ in _SHARDED for part in model.modules() for kind in type(part).__mro__
    ):
        return True
    return "DistributedDataParallel" in kinds and any(True for _ in model.buffers())
