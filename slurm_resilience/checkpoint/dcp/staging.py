"""[torch] Copies of what one rank will write, in buffers that are reused from save to save.

Memory: as many bytes as this rank writes (for replicated state that is its share, not the whole), kept until the buffers
are dropped; pinned when the tensors are on an accelerator.
"""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from slurm_resilience.checkpoint.dcp import layout


class Staging:
    """A :class:`~slurm_resilience.checkpoint.dcp.write.Source` that holds copies.  Not for two saves at once."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._bytes: dict[MetadataIndex, bytes] = {}

    @property
    def nbytes(self) -> int:
        """What the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + sum(map(len, self._bytes.values()))

    @staticmethod
    def bytes_of(plan: SavePlan) -> int:
        """What the buffers will take for ``plan``, bytes entries aside."""
        return layout.expected_bytes([plan])

    def take(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy everything that ``plan`` will write; when it returns, the live tensors may change."""
        self._bytes = {}
        wanted: set[MetadataIndex] = set()
        devices: set[torch.device] = set()
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                self._bytes[item.index] = data.getvalue()
                continue
            tensor = data.detach()
            wanted.add(item.index)
            self._buffer(item.index, tensor).copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
        for index in self._buffers.keys() - wanted:
            del self._buffers[index]
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The copy that was taken of an item."""
        raw = self._bytes.get(write_item.index)
        return self._buffers[write_item.index] if raw is None else io.BytesIO(raw)

    def _buffer(self, index: MetadataIndex, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(index)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            pin = tensor.device.type == "cuda"
            known = self._buffers[index] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        return known
