"""The loss of one small, fixed batch: what the weights say, asked without leaving a trace.

The batch is kept in the checkpoint, with the loss that the saved weights gave.  The loss that was *logged* at a step belongs
to the weights before that step's update, so it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from slurm_resilience.errors import ConfigError
from slurm_resilience.training import fqn, rng


class Probe:
    """``fn(*batch)`` gives the loss; every rank calls it with the same batch."""

    def __init__(self, fn: Callable[..., Any], batch: Sequence[torch.Tensor], tolerance: float | None) -> None:
        if not callable(fn):
            raise ConfigError(
                "run.probe() needs a function that returns a loss", evidence=f"it was given a {type(fn).__name__}"
            )
        for one in batch:
            if not isinstance(one, torch.Tensor):
                raise ConfigError("The batch of run.probe() must be tensors", evidence=f"one of them is a {type(one).__name__}")
        self.fn = fn
        self.batch = tuple(batch)
        self.tolerance = tolerance
        self.low_precision = False

    def measure(
        self, models: Iterable[torch.nn.Module], batch: Sequence[torch.Tensor] | None = None, *, look: bool = True
    ) -> float:
        """The loss as of now: evaluation mode, no gradients; random generators and buffers are as before, bit by bit.

        Afterwards ``low_precision`` says, after a ``look``, whether any module answered in a type of fewer than 32 bits.
        """
        models = list(models)
        modes = [(module, module.training) for model in models for module in model.modules()]
        seen = register_module_forward_hook(self._see) if look else None
        try:
            for model in models:
                model.eval()
            with untouched(models), torch.no_grad():
                return to_float(self.fn(*(self.batch if batch is None else batch)))
        finally:
            if seen is not None:
                seen.remove()
            for module, training in modes:
                module.training = training

    def _see(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.element_size() < 4:
            self.low_precision = True


@contextmanager
def untouched(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Around forward passes that training must not notice: generators and buffers are put back, shards are settled."""
    models = list(models)
    buffers = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
    try:
        with rng.forked():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for model in models:
            fqn.settle(model)


def to_float(value: Any) -> float:
    """A number out of a number, a tensor or a distributed tensor (for which all ranks must come)."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
