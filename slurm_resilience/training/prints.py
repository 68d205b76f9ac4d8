"""Which parts of the state need no sums after a load, since the digests of their bytes are those of the state that was saved?

When a state is taken, each part of a tensor that lies in main memory gets a print beside its sums: an xxh3 over the digests of
its chunks, as the file keeps them.  A load digests every chunk in the memory that it was read into.  Where a rank reads a part
as one rank has had it, equal prints say that the same bits are there, so the sums and the finiteness that were found then hold.
On another mesh, on accelerators and where prints differ the sums are taken anew, of what was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slurm_resilience.checkpoint import digest
from slurm_resilience.training import bit_sums


def of(local: torch.Tensor) -> str:
    """The print of a part as it is now; "" for one that is empty, or that is not in main memory in one piece."""
    if local.device.type != "cpu" or not local.numel() or not local.is_contiguous():
        return ""
    if local.is_conj() or local.is_neg():
        return ""
    flat = local.detach().reshape(-1)
    return of_digests(digest.digest((flat if flat.dtype == torch.float32 else flat.view(torch.uint8)).numpy().data))


def of_digests(joined: str) -> str:
    """The print of a part whose chunks have these digests."""
    return digest.chunk_digest(joined.encode())


class Prints:
    """Watches a load into ``parts`` (by name: where in the whole tensor this rank's part lies, and the part).

    ``boxes`` is what the checkpoint has kept, if anything; see :func:`state_digest.kept`.
    """

    def __init__(
        self, boxes: Mapping[str, Sequence[Any]] | None, parts: Mapping[str, tuple[tuple[int, ...], torch.Tensor]]
    ) -> None:
        self._kept = boxes or {}
        self._parts = parts
        self._shared = _overlapping(parts)
        self.sums: dict[str, bit_sums.Sums] = {}

    def __call__(self, key: str, target: torch.Tensor, joined: str) -> None:
        """``target`` was filled with bytes whose chunks have these digests."""
        if key not in self._kept or key not in self._parts or key in self._shared:
            return
        offset, local = self._parts[key]
        if (target.data_ptr(), target.shape, target.dtype) != (local.data_ptr(), local.shape, local.dtype):
            return  # what was filled is not what is held, or a part of it
        for at, size, print_, sums, finite in self._kept[key]:
            if (tuple(at), tuple(size)) == (offset, tuple(local.shape)) and print_ == of_digests(joined):
                self.sums[key] = bit_sums.Sums(int(sums[:16], 16), int(sums[16:], 16), bool(finite))


def _overlapping(parts: Mapping[str, tuple[tuple[int, ...], torch.Tensor]]) -> set[str]:
    """Parts of which some memory belongs to another part too: what is loaded there later is what counts."""
    spans = sorted((local.data_ptr(), local.data_ptr() + _extent(local), key) for key, (_, local) in parts.items())
    found: set[str] = set()
    reach, owner = 0, ""
    for start, stop, key in spans:
        if start < reach:
            found |= {owner, key}
        if stop > reach:
            reach, owner = stop, key
    return found


def _extent(local: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if local.is_contiguous() or not local.numel():
        return local.nbytes
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return (last + 1) * local.dtype.itemsize
