"""[torch] Reading a checkpoint in one pass: each byte is read once, digested while it is warm, and is where it belongs.

Only the 4 MiB chunks that a rank needs are read, so a resharding load verifies exactly what it uses.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from slurm_resilience.checkpoint.digest import CHUNK_BYTES, chunk_digest, chunks
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.manifest import Item, Manifest
from slurm_resilience.checkpoint.trust import Trust

BLOCK_BYTES = 16 * CHUNK_BYTES
SWALLOW_BYTES = 1 << 19

Watch = Callable[[str, torch.Tensor, str], None]
"""Called with the name of a tensor, the memory that one whole item of it was read into, and the digests of its chunks there.

Not called where data went through other memory: to an accelerator, to another type, or into a part of another shape.
"""


class ShardReader:
    """The open files of one checkpoint, as one rank reads them."""

    def __init__(self, directory: Path, manifest: Manifest, trust: Trust) -> None:
        self._trust = trust
        self._directory = directory
        self._manifest = manifest
        self._items = {(item.key, item.at): item for item in manifest.items}
        self.bytes_read = 0

    def item(self, request: ReadItem) -> Item:
        """The record that a read request wants.  Raises :class:`CorruptCheckpoint`."""
        index = request.storage_index
        found = self._items.get((index.fqn, tuple(index.offset or ())))
        if found is None:
            raise CorruptCheckpoint(
                f"The manifest of {self._directory.name} knows no data for {index.fqn}", evidence=repr(index)
            )
        return found

    def check(self, plan: LoadPlan) -> None:
        """Every file that ``plan`` needs is there with its full length and is ours; no data is read.

        Raises :class:`CorruptCheckpoint` or :class:`UntrustedCheckpoint`.
        """
        for file in sorted({self.item(request).file for request in plan.items}):
            os.close(self._open(file))

    def read(self, plan: LoadPlan, planner: LoadPlanner, watch: Watch | None = None) -> None:
        """Fill everything that ``plan`` asks for.  Raises :class:`CorruptCheckpoint` naming the first bad item."""
        wanted = sorted(
            ((self.item(request), request) for request in plan.items), key=lambda pair: (pair[0].file, pair[0].offset)
        )
        at = 0
        while at < len(wanted):
            file = wanted[at][0].file
            fd = self._open(file)
            try:
                while at < len(wanted) and wanted[at][0].file == file:
                    self._read_item(fd, *wanted[at], planner, watch)
                    at += 1
            finally:
                os.close(fd)

    def _open(self, file: str) -> int:
        path = self._directory / file
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CorruptCheckpoint(
                f"{file} of checkpoint {self._directory.name} cannot be opened", evidence=str(error)
            ) from error
        try:
            info = os.fstat(fd)
            self._trust.check(path, info)
            if info.st_size != self._manifest.files[file]["bytes"]:
                raise CorruptCheckpoint(
                    f"{file} of checkpoint {self._directory.name} has the wrong length",
                    evidence=f"{info.st_size} bytes, {self._manifest.files[file]['bytes']} were committed",
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read_item(self, fd: int, item: Item, request: ReadItem, planner: LoadPlanner, watch: Watch | None) -> None:
        source = _Source(fd, item, self._directory.name)
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(source.record()))
        else:
            target = planner.resolve_tensor(request).detach()
            in_place = _fill(target, source, item, tuple(request.storage_offsets), tuple(request.lengths))
            if watch is not None and in_place and tuple(request.lengths) == item.shape:
                watch(request.dest_index.fqn, target, item.digest)
            planner.commit_tensor(request, target)
        self.bytes_read += source.bytes_read


class _Source:
    """One record's data: any range of it, verified chunk by chunk, each chunk read once when ranges ascend."""

    def __init__(self, fd: int, item: Item, name: str) -> None:
        self._fd = fd
        self._item = item
        self._name = name
        self._digests = chunks(item.digest)
        self._cached = -1
        self._cache = bytearray()
        self.bytes_read = 0

    def record(self) -> bytes:
        """The whole record of an item that is bytes."""
        out = bytearray(self._item.data_length)
        self.fill(memoryview(out), 0)
        return bytes(out)

    def opaque(self) -> torch.Tensor:
        """The tensor of a record whose data we could not tell from its frame when it was written."""
        raw = bytearray(self._item.length)
        self._pread(memoryview(raw), self._item.offset)
        self._compare(self._item.frame, chunk_digest(raw), "its record")
        loaded = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        assert isinstance(loaded, torch.Tensor)
        return loaded

    def fill(self, out: memoryview, start: int) -> None:
        """Put the data from byte ``start`` on into ``out``.  Raises :class:`CorruptCheckpoint`."""
        stop = start + len(out)
        at = start
        while at < stop:
            number = at // CHUNK_BYTES
            low = number * CHUNK_BYTES
            high = min(low + CHUNK_BYTES, self._item.data_length)
            if at == low and high <= stop and number != self._cached:
                piece = out[at - start : high - start]
                self._chunk(piece, number)
            else:
                if number != self._cached:
                    self._cache = bytearray(high - low)
                    self._chunk(memoryview(self._cache), number)
                    self._cached = number
                high = min(high, stop)
                out[at - start : high - start] = memoryview(self._cache)[at - low : high - low]
            at = high

    def _chunk(self, out: memoryview, number: int) -> None:
        start = self._item.data_offset + number * CHUNK_BYTES
        running = xxhash.xxh3_64()
        for at in range(0, len(out), SWALLOW_BYTES):  # hashed while it is still in the core's own cache
            some = out[at : at + SWALLOW_BYTES]
            self._pread(some, start + at)
            running.update(some)
        self._compare(self._digests[number], running.hexdigest(), f"bytes from {number * CHUNK_BYTES} on")

    def _compare(self, expected: str, found: str, what: str) -> None:
        if expected != found:
            raise CorruptCheckpoint(
                f"{self._item.key} in {self._item.file} of checkpoint {self._name} is damaged",
                evidence=f"{what}: xxh3 {found}, committed was {expected}",
            )

    def _pread(self, out: memoryview, at: int) -> None:
        done = 0
        while done < len(out):
            got = os.preadv(self._fd, [out[done:]], at + done)
            if not got:
                raise CorruptCheckpoint(
                    f"{self._item.file} of checkpoint {self._name} ends too early", evidence=f"at byte {at + done}"
                )
            done += got
        self.bytes_read += done


def _fill(target: torch.Tensor, source: _Source, item: Item, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Copy the box at ``offsets`` of size ``lengths`` out of the item into ``target``; whether it was read into its memory."""
    if target.numel() == 0:
        return False
    if not item.data_length:
        box = source.opaque()
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            box = box.narrow(dim, offset, length)
        target.copy_(box)
        return False
    dtype: torch.dtype = getattr(torch, item.dtype)
    row = math.prod(item.shape[1:]) * dtype.itemsize
    first, count = (offsets[0], lengths[0]) if item.shape else (0, 1)
    whole_rows = offsets[1:] == (0,) * len(offsets[1:]) and lengths[1:] == item.shape[1:]
    if whole_rows and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        source.fill(_bytes_of(target), first * row)
        return True
    rows_at_once = max(1, BLOCK_BYTES // max(1, row))
    for begin in range(0, count, rows_at_once):
        rows = min(rows_at_once, count - begin)
        scratch = torch.empty((rows, *item.shape[1:]) if item.shape else (), dtype=dtype)
        source.fill(_bytes_of(scratch), (first + begin) * row)
        for dim in range(1, len(item.shape)):
            scratch = scratch.narrow(dim, offsets[dim], lengths[dim])
        (target.narrow(0, begin, rows) if item.shape else target).copy_(scratch)
    return False


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
