"""[torch] One rank's shard file: records in DCP's own format, digested while they are written, fsynced at the end.

Plain ``torch.distributed.checkpoint.load`` reads these files too; our own reader skips the zip frame around each tensor.
"""

from __future__ import annotations

import io
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from slurm_resilience.checkpoint import digest, names
from slurm_resilience.checkpoint.manifest import Item
from slurm_resilience.errors import CheckpointError

FLUSH_BYTES = 32 << 20


@dataclass(frozen=True)
class Shard:
    """What one rank wrote: its file's name and length, its items, and where DCP will find them."""

    file: str
    bytes: int
    items: list[Item]
    stored: list[tuple[MetadataIndex, _StorageInfo]]


class _Flusher:
    """Sends a growing file to the disk while it grows, so that the fsync at its end finds little left to do.

    ``error`` must be looked at: the kernel tells a failed write-back once, and the final fsync would not hear of it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unsent = 0
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None

    def wrote(self, count: int) -> None:
        self._unsent += count
        if self._unsent >= FLUSH_BYTES and (self._thread is None or not self._thread.is_alive()):
            self._unsent = 0
            self._thread = threading.Thread(target=self._send, name="checkpoint-flush", daemon=True)
            self._thread.start()

    def _send(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self.error = error

    def settle(self) -> None:
        """Wait until the file descriptor is no longer in use."""
        if self._thread is not None:
            self._thread.join()


class _Sink:
    """The file that ``torch.save`` writes into: notes where the tensor's own bytes went, digests the rest as the frame.

    Source: torch.serialization hands a storage over in one ``write`` of the storage's own memory.  Where it does not, the
    whole record is frame: it is still verified, and read through ``torch.load``.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.at = 0
        self._address = self._want = 0
        self._frame = xxhash.xxh3_64()
        self._pending: list[bytes] = []
        self.found: tuple[int, str] | None = None
        self.error: OSError | None = None
        self._flusher = _Flusher(fd)

    def end(self) -> None:
        """Write what is left.  Raises what went wrong on the way to the disk."""
        self.drain()
        self._flusher.settle()
        if self._flusher.error is not None:
            raise self._flusher.error

    def settle(self) -> None:
        """Wait until nothing else uses the file descriptor."""
        self._flusher.settle()

    def expect(self, address: int, data_bytes: int) -> None:
        """The next record's data lies at this address of our memory."""
        self._address, self._want = address, data_bytes
        self._frame.reset()
        self.found = None

    @property
    def frame(self) -> str:
        return self._frame.hexdigest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._want and len(view) == self._want and _address(view) == self._address:
            self.drain()
            self.found = (self.at, digest.digest(view))
            self._put(view)
        else:
            self._frame.update(view)
            self._pending.append(bytes(view))
        self.at += len(view)
        return len(view)

    def flush(self) -> None:
        """Part of the file protocol; see :meth:`drain`."""

    def drain(self) -> None:
        """Write the small pieces collected so far: one call for a whole frame."""
        if self._pending:
            self._put(memoryview(b"".join(self._pending)))
            self._pending.clear()

    def _put(self, view: memoryview) -> None:
        try:
            while view:
                written = os.write(self._fd, view[:FLUSH_BYTES])
                view = view[written:]
                self._flusher.wrote(written)
        except OSError as error:
            self.error = error
            raise


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Source(Protocol):
    """Where the data of a save comes from: a planner (the live tensors), or copies of them."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO: ...


def write_shard(directory: Path, rank: int, plan: SavePlan, source: Source) -> Shard | None:
    """Write this rank's items durably; None when it has none.  Any failure is raised, and the directory is then poison."""
    if not plan.items:
        return None
    name = names.shard_file(rank)
    items: list[Item] = []
    stored: list[tuple[MetadataIndex, _StorageInfo]] = []
    fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    sink = _Sink(fd)
    try:
        for item in plan.items:
            record = _write_item(sink, name, item, source)
            items.append(record)
            stored.append((item.index, _StorageInfo(name, record.offset, record.length)))
        sink.end()
        os.fsync(fd)
    finally:
        sink.settle()
        os.close(fd)
    return Shard(name, sink.at, items, stored)


def _write_item(sink: _Sink, file: str, item: WriteItem, source: Source) -> Item:
    start = sink.at
    data = source.resolve_data(item)
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise CheckpointError(f"The planner gave a {type(data).__name__} for the bytes of {key}")
        view = data.getbuffer()
        joined = digest.digest(view)
        sink.expect(0, 0)
        sink.write(view)
        return Item(key, file, start, len(view), start, len(view), joined)
    if not isinstance(data, torch.Tensor):
        raise CheckpointError(f"The planner gave a {type(data).__name__} for the tensor {key}")
    tensor = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    sink.expect(tensor.data_ptr(), tensor.nbytes)
    try:
        torch.save(tensor, sink)  # type: ignore[arg-type]  # it needs write and flush, no more
    except RuntimeError:
        if sink.error is not None:  # the zip writer turns "no space left" into "unexpected pos"
            raise sink.error from None
        raise
    at, joined = sink.found or (start, "")
    return Item(
        key,
        file,
        start,
        sink.at - start,
        at,
        tensor.nbytes if sink.found else 0,
        joined,
        sink.frame,
        str(tensor.dtype).removeprefix("torch."),
        tuple(item.index.offset or ()),
        tuple(tensor.shape),
    )
