"""Do the objects hold the very bits that were loaded?  Asked without adding up every bit a second time.

The sums of the state digest are those of the tensors right after they were loaded.  Once the objects
have taken their state, most of them hold the same memory, and torch counts every write to it: what was not written to since
then is what it was.  Where that proves nothing (a model copies what it is given, hooks or an optimizer of the user's own may do
anything) the bytes themselves are compared, by a fast hash, and where there is no such hash (accelerators) or it differs, the
sums are taken again of what is there now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from slurm_resilience.training import bit_sums, state_digest
from slurm_resilience.training.state_digest import Row


class _Sight(NamedTuple):
    """One tensor as it was seen: where it lies, how often it was written to, and, where asked for, a hash of its bytes.

    ``written``: the count of writes proves nothing of it.
    """

    address: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    shape: torch.Size
    writes: int
    written: bool
    print: int | None


class AsLoaded:
    """What one rank has loaded, as it was then.

    ``written`` says of which tensors, by name, the count of writes proves nothing; ``known``: sums that need not be taken.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        written: Callable[[str], bool],
        known: Mapping[str, bit_sums.Sums] | None = None,
    ) -> None:
        self.rows = state_digest.part_of(tensors, known=known)
        self._seen = {key: _see(tensor, written(key)) for key, tensor in tensors.items()}

    def of(self, keys: Mapping[str, object]) -> list[Row]:
        """What was loaded under these names."""
        return [row for row in self.rows if row.key in keys]

    def now(self, held: Mapping[str, torch.Tensor]) -> list[Row]:
        """The sums of what is held now.  Changes nothing, talks to nobody."""
        other = {key: tensor for key, tensor in held.items() if not self._is(key, tensor)}
        if not other and len(held) == len(self._seen):
            return self.rows
        return [row for row in self.rows if row.key in held and row.key not in other] + state_digest.part_of(other)

    def _is(self, key: str, tensor: torch.Tensor) -> bool:
        then = self._seen.get(key)
        if then is None:
            return False
        local = _local(tensor)
        if tensor.dtype != then.dtype or local.shape != then.shape:
            return False
        if then.written:
            return then.print is not None and _print(local) == then.print
        return (local.data_ptr(), local._version, local.stride()) == (then.address, then.writes, then.strides)


def _see(tensor: torch.Tensor, written: bool) -> _Sight:
    local = _local(tensor)
    mark = _print(local) if written else None
    return _Sight(local.data_ptr(), local.stride(), tensor.dtype, local.shape, local._version, written, mark)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _print(local: torch.Tensor) -> int | None:
    if local.device.type != "cpu":
        return None
    flat = local.detach().reshape(-1)
    return xxhash.xxh3_64_intdigest((flat if flat.dtype == torch.float32 else flat.view(torch.uint8)).numpy().data)
