"""What tensors does a checkpoint hold, of which shape and type?  Read from its manifest, which needs no unpickling."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slurm_resilience.checkpoint.errors import CorruptCheckpoint


class Layout:
    """The names, global shapes and types of the tensors in one checkpoint."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        self._tensors = tensors
        self._names = sorted(tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def under(self, prefix: str) -> Iterator[str]:
        """The names that start with ``prefix``, sorted."""
        for place in range(bisect_left(self._names, prefix), len(self._names)):
            if not self._names[place].startswith(prefix):
                return
            yield self._names[place]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key]["shape"])

    def dtype(self, key: str) -> torch.dtype:
        """Raises :class:`CorruptCheckpoint` for a type that this torch does not have."""
        name = str(self._tensors[key]["dtype"]).removeprefix("torch.")
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpoint(
                f"Tensor {key} has the type {name!r}", evidence=f"torch {torch.__version__} has no such type"
            )
        return dtype
