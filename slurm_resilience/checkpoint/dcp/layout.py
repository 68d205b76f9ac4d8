"""[torch] What is in a checkpoint, between DCP's own terms and the manifest's.

Reading goes by the manifest alone: DCP's ``.metadata`` is written, for others, and never unpickled by us.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import ranks
from slurm_resilience.checkpoint.dcp.write import Shard
from slurm_resilience.checkpoint.errors import MismatchedCheckpoint
from slurm_resilience.checkpoint.manifest import Item, Manifest
from slurm_resilience.errors import CheckpointError


def write_metadata(directory: Path, name: str, metadata: Metadata, shards: Iterable[Shard]) -> bytes:
    """Write DCP's ``.metadata`` durably, after a check that every declared item was stored; returns its bytes.

    Raises :class:`CheckpointError` when an item is declared and nobody wrote it.
    """
    metadata.storage_data = {index: info for shard in shards for index, info in shard.stored}
    metadata.storage_meta = StorageMeta(save_id=name)
    if hasattr(metadata, "version"):  # from 2.9 on
        metadata.version = dcp_files.CURRENT_DCP_VERSION
    stored = {(index.fqn, tuple(index.offset or ())) for index in metadata.storage_data}
    for key, about in metadata.state_dict_metadata.items():
        for at in [tuple(chunk.offsets) for chunk in about.chunks] if isinstance(about, TensorStorageMetadata) else [()]:
            if (key, at) not in stored:
                raise CheckpointError(f"{key} at {at} was planned and no rank has written it")
    raw = pickle.dumps(metadata)
    fd = os.open(directory / names.METADATA, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return raw


def expected_bytes(plans: Iterable[SavePlan]) -> int:
    """About how many bytes a save will write: its tensors; frames and manifest come on top."""
    total = 0
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.chunk is not None:
                total += math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    return total


def tensors(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Global shape and dtype of every tensor, as the manifest keeps them."""
    return {
        key: {"dtype": str(about.properties.dtype).removeprefix("torch."), "shape": list(about.size)}
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def metadata(manifest: Manifest) -> Metadata:
    """The DCP metadata that a load plan needs, made from the manifest."""
    out: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=getattr(torch, about["dtype"])), torch.Size(about["shape"]), [])
        for key, about in manifest.tensors.items()
    }
    for item in manifest.items:
        if item.dtype:
            out[item.key].chunks.append(ChunkStorageMetadata(torch.Size(item.at), torch.Size(item.shape)))
        else:
            out[item.key] = BytesStorageMetadata()
    return Metadata(out)


def content(items: Iterable[Item]) -> dict[str, str]:
    """One digest over all tensors under each top-level key: equal digests at different steps mean that nothing moved."""
    hashes: dict[str, Any] = {}
    for item in sorted((item for item in items if item.dtype), key=lambda item: (item.key, item.at)):
        if ranks.is_own(item.key):
            continue
        top = ranks.top_of(item.key)
        hashes.setdefault(top, xxhash.xxh3_64()).update(f"{item.key}{item.at}{item.shape}{item.digest}".encode())
    return {top: value.hexdigest() for top, value in hashes.items()}


def check_matches(state_dict: dict[str, Any], saved: Metadata, name: str, *, strict: bool) -> None:
    """What is asked for is what was saved.  Raises :class:`MismatchedCheckpoint` with all differences.

    A missing key, another shape, another dtype, a tensor where bytes were saved; and, with ``strict``, keys that were
    saved beside those asked for and that nobody asks for.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(state_dict)
    wrong: list[str] = []
    for key, value in flat.items():
        about = saved.state_dict_metadata.get(key)
        if about is None:
            wrong.append(f"{key} was not saved")
        elif isinstance(about, TensorStorageMetadata):
            if not hasattr(value, "dtype"):
                wrong.append(f"{key} was saved as a tensor, {type(value).__name__} is asked for")
            elif about.size != value.size():
                wrong.append(f"{key} was saved with shape {tuple(about.size)}, {tuple(value.size())} is asked for")
            elif about.properties.dtype != value.dtype:
                wrong.append(f"{key} was saved as {about.properties.dtype}, {value.dtype} is asked for")
        elif hasattr(value, "dtype"):
            wrong.append(f"{key} was saved as a value, a tensor is asked for")
    if strict:
        tops = {ranks.top_of(key) for key in flat}
        wrong += [
            f"{key} was saved and nobody asks for it"
            for key in saved.state_dict_metadata
            if key not in flat and ranks.top_of(key) in tops and not ranks.is_own(key)
        ]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise MismatchedCheckpoint(
            f"Checkpoint {name} does not fit this model: {'; '.join(wrong[:6])}{more}",
            evidence=f"its manifest holds {len(saved.state_dict_metadata)} keys, {len(flat)} are asked for",
            remedy="resume with the model, optimizer and scheduler that saved it, or give the run another checkpoint directory",
        )
