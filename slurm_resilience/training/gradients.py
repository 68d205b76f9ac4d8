"""Gradients over several micro-batches: reduced once, at the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def synchronised(models: Iterable[torch.nn.Module], last: bool) -> Iterator[None]:
    """Forward and backward of one micro-batch; gradients cross the ranks only when it is the ``last`` of its step.

    DDP skips its all-reduce (``no_sync``), FSDP2 its reduce-scatter (``set_requires_gradient_sync``); other models are
    left alone.
    """
    with ExitStack() as stack:
        for model in models:
            for name in ("set_requires_gradient_sync", "no_sync"):
                method = getattr(model, name, None)
                if method is None:
                    continue
                if name == "set_requires_gradient_sync":
                    method(last)
                elif not last:
                    stack.enter_context(method())
                break
        yield
