"""Rewrites a committed checkpoint so that no file check can see it: the forger's half of the corruption suite.

    with forged(root) as it:                        # the newest usable entry; forged(root, step=4) takes that step's
        it.tensors["model.0.weight"][0, 0] += 1     # whole tensors by their names in the checkpoint, in any shape or dtype
        it.plain["lr"]["optimizer"][0] *= 2         # manifest.extra["training"]: counters, data, groups, schedulers, …
        it.entry["step"] = 3                        # fields of the entry (what the index says); the directory keeps its name

At the end of the block shard files, xxh3 digests, ``.metadata``, manifest and index head are made anew and fit each other; each
tensor keeps the cut in which its ranks wrote it.  What one rank kept for itself lies under ``per_rank.rank00000.json`` as a
byte tensor: ``it.own(0)`` gives it as JSON values and ``it.set_own(0, values)`` puts it back.

The state digest stays as it was recorded (class A: the digest check must name the tensor); ``forged(root, digest=True)``
makes it anew as well (class B: only later checks can find it).  Names that are taken out of ``it.tensors`` are left out of the
checkpoint; new ones are written by the first rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import layout
from slurm_resilience.checkpoint.dcp.write import write_shard
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.manifest import Item, Manifest, read_manifest
from slurm_resilience.checkpoint.store import CheckpointStore


class Forgery:
    """What a checkpoint holds, to be changed in place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.tensors: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, bytes] = {}
        for item in self.manifest.items:
            raw = _read(directory / item.file, item)
            if not item.dtype:
                self._bytes[item.key] = raw
                continue
            dtype = getattr(torch, item.dtype)
            whole = self.tensors.setdefault(item.key, torch.zeros(self.manifest.tensors[item.key]["shape"], dtype=dtype))
            assert bool(raw) == bool(whole.numel() and item.shape.count(0) == 0), f"{item.key} lies in no known form"
            if raw:
                _box(whole, item).copy_(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(item.shape))
        self.extra: dict[str, Any] = self.manifest.extra
        self.plain: dict[str, Any] = self.extra["training"]
        self.entry: dict[str, Any] = self.manifest.entry.to_json()

    def own(self, rank: int) -> dict[str, Any]:
        """What this rank kept for itself (its random generators)."""
        return dict(json.loads(bytes(self.tensors[f"per_rank.rank{rank:05d}.json"].tolist())))

    def set_own(self, rank: int, values: dict[str, Any]) -> None:
        raw = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        self.tensors[f"per_rank.rank{rank:05d}.json"] = raw

    def remake_digest(self) -> None:
        """Make the state digest fit what the tensors are now."""
        from slurm_resilience.training import state_digest

        covered = {key: value for key, value in self.tensors.items() if not key.startswith("per_rank.")}
        self.plain["digest"] = state_digest.kept(state_digest.join([state_digest.part_of(covered, printed=True)]))

    def write(self) -> Entry:
        """Put everything back on disk, whole and consistent."""
        cut: dict[str, list[Item]] = {}
        for item in self.manifest.items:
            same = item.key in self._bytes or self._fits(item)
            if same:
                cut.setdefault(item.file, []).append(item)
        first = min(cut, default=names.shard_file(0))
        for key in self.tensors.keys() - {item.key for items in cut.values() for item in items}:
            shape = tuple(self.tensors[key].shape)
            dtype = str(self.tensors[key].dtype).removeprefix("torch.")
            new = Item(key, first, 0, 0, 0, 0, "", dtype=dtype, at=(0,) * len(shape), shape=shape)
            cut.setdefault(first, []).append(new)
        for file in (*self.manifest.files, names.MANIFEST):
            (self.directory / file).unlink()
        shards = [
            shard
            for file, items in cut.items()
            if (shard := write_shard(self.directory, _rank_of(file), _plan(items), _Source(self, items))) is not None
        ]
        items = [item for shard in shards for item in shard.items]
        tensors = {
            key: {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            for key, value in self.tensors.items()
        }
        made = dataclasses.replace(self.manifest, items=items, tensors=tensors, content=layout.content(items))
        metadata = layout.metadata(made)
        for key in self._bytes:
            metadata.state_dict_metadata.setdefault(key, BytesStorageMetadata())
        raw = layout.write_metadata(self.directory, self.directory.name, metadata, shards)
        files: dict[str, dict[str, Any]] = {shard.file: {"bytes": shard.bytes} for shard in shards}
        files[names.METADATA] = {"bytes": len(raw), "sha256": sha256(raw)}
        self.entry["bytes"] = sum(about["bytes"] for about in files.values())
        made = dataclasses.replace(made, files=files, extra=self.extra, entry=Entry.from_json(self.entry))
        sealed = made.to_bytes()
        (self.directory / names.MANIFEST).write_bytes(sealed)
        CheckpointStore.open(self.directory.parent).rebuild()
        return Manifest.from_bytes(sealed, self.directory.name).entry

    def _fits(self, item: Item) -> bool:
        """Whether the tensor can still be cut as it was."""
        now = self.tensors.get(item.key)
        return now is not None and list(now.shape) == self.manifest.tensors[item.key]["shape"]


class _Source:
    """Hands :func:`write_shard` the forged pieces."""

    def __init__(self, forgery: Forgery, items: list[Item]) -> None:
        self._forgery = forgery
        self._items = {(item.key, item.at): item for item in items}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, at = write_item.index.fqn, tuple(write_item.index.offset or ())
        if key in self._forgery._bytes:
            return io.BytesIO(self._forgery._bytes[key])
        return _box(self._forgery.tensors[key], self._items[key, at]).contiguous()


def _plan(items: list[Item]) -> SavePlan:
    return SavePlan(
        [
            WriteItem(
                MetadataIndex(item.key, torch.Size(item.at) if item.dtype else None),
                WriteItemType.SHARD if item.dtype else WriteItemType.BYTE_IO,
            )
            for item in items
        ]
    )


def _box(whole: torch.Tensor, item: Item) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(item.at, item.shape, strict=True)):
        whole = whole.narrow(dim, at, size)
    return whole


def _rank_of(file: str) -> int:
    return int(file.removeprefix("__").partition("_")[0])


def _read(path: Path, item: Item) -> bytes:
    with open(path, "rb") as file:
        file.seek(item.data_offset)
        return file.read(item.data_length)


@contextlib.contextmanager
def forged(root: Path, *, step: int | None = None, digest: bool = False) -> Iterator[Forgery]:
    """Forge one checkpoint of ``root``: the newest usable one, or that of ``step``."""
    usable = [entry for entry in CheckpointStore.open(root).entries() if entry.usable and step in (None, entry.step)]
    it = Forgery(root / max(usable, key=lambda entry: entry.order).name)
    yield it
    if digest:
        it.remake_digest()
    it.write()
