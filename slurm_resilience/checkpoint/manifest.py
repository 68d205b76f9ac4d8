"""The manifest of one checkpoint: every file, every item in it, its length and digest; readable without torch.

One sealed JSON document (see sealed.py) in the checkpoint's directory, written last and before the rename, so that a
committed directory always has one.  Items lie in their file without gaps, so that verified items mean a verified file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint import names, sealed
from slurm_resilience.checkpoint.digest import sha256
from slurm_resilience.checkpoint.entry import Entry, is_count
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.errors import CheckpointError, FormatError

VERSION = 1


@dataclass(frozen=True)
class Item:
    """One tensor shard, or one block of bytes, in one rank's file.

    ``offset`` and ``length`` are DCP's: the whole record.  The tensor's own bytes are ``data_length`` bytes from
    ``data_offset`` on (row-major); ``digest`` holds one xxh3 per 4 MiB of them, ``frame`` the xxh3 of the record's
    bytes around them.  For bytes there is no frame, and the data is the record.
    """

    key: str
    file: str
    offset: int
    length: int
    data_offset: int
    data_length: int
    digest: str
    frame: str = ""
    dtype: str = ""
    at: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        row: list[Any] = [self.key, self.file, self.offset, self.length, self.data_offset, self.data_length, self.digest]
        if self.dtype:
            row += [self.frame, self.dtype, list(self.at), list(self.shape)]
        return row

    @classmethod
    def from_json(cls, row: list[Any]) -> Item:
        head, rest = row[:7], row[7:]
        if rest:
            rest = [rest[0], rest[1], tuple(rest[2]), tuple(rest[3])]
        return cls(*head, *rest)


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint besides its tensors' values."""

    entry: Entry
    files: dict[str, dict[str, Any]]
    items: list[Item]
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return sealed.seal(
            {
                "v": VERSION,
                "entry": self.entry.to_json(),
                "files": self.files,
                "items": [item.to_json() for item in self.items],
                "tensors": self.tensors,
                "extra": self.extra,
                "content": self.content,
                "versions": self.versions,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Raises :class:`CorruptCheckpoint` when it is damaged, :class:`FormatError` when a newer release wrote it."""
        try:
            body = sealed.unseal(raw)
        except sealed.Broken as error:
            raise CorruptCheckpoint(f"The manifest of {where} is damaged", evidence=str(error)) from None
        if not isinstance(body, dict) or not isinstance(body.get("v"), int):
            raise CorruptCheckpoint(f"The manifest of {where} is not one", evidence="it has no version")
        if body["v"] > VERSION:
            raise FormatError(
                f"The manifest of {where} was written by a newer release",
                evidence=f"its version is {body['v']}, we know up to {VERSION}",
                remedy="install that release of slurm-resilience, or resume from an older checkpoint",
            )
        try:
            entry = Entry.from_json({**body["entry"], "manifest_sha256": sha256(raw)})
            items = [Item.from_json(row) for row in body["items"]]
            _require_form(body, items)
            return cls(entry, body["files"], items, body["tensors"], body["extra"], body["content"], body["versions"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpoint(
                f"The manifest of {where} is not one", evidence=f"{type(error).__name__}: {error}"
            ) from None


def _require_form(body: dict[str, Any], items: list[Item]) -> None:
    """Raise ValueError for a manifest that nobody could work with, however well it is sealed."""
    for part in ("files", "tensors", "extra", "content", "versions"):
        if not isinstance(body[part], dict):
            raise ValueError(f"its {part} are no object")
    if any(not _inside(file) for file in [*body["files"], *(item.file for item in items)]):
        raise ValueError("a file outside of the checkpoint's directory")
    for file, about in body["files"].items():
        if not is_count(about["bytes"]) or not isinstance(about.get("sha256", ""), str):
            raise ValueError(f"it does not say how long {file!r:.60} is")
    for item in items:
        numbers = (item.offset, item.length, item.data_offset, item.data_length)
        if not all(map(is_count, numbers)) or not all(isinstance(word, str) for word in (item.key, item.digest, item.frame)):
            raise ValueError(f"it does not say where {item.key!r:.60} lies")
        end, data_end = item.offset + item.length, item.data_offset + item.data_length
        if not item.offset <= item.data_offset <= data_end <= end <= body["files"][item.file]["bytes"]:
            raise ValueError(f"{item.key!r:.60} lies outside of its place in {item.file!r:.60}")
    if not all(isinstance(about, dict) for about in body["tensors"].values()):
        raise ValueError("it does not say what its tensors are")


def _inside(file: str) -> bool:
    """A relative name that stays below the directory it is relative to."""
    return not {"", ".", ".."} & set(file.split("/"))


def read_manifest(directory: Path, *, expect_sha256: str = "") -> Manifest:
    """The manifest in a committed directory, checked against itself, its directory's name and the index.

    Raises :class:`CorruptCheckpoint`.
    """
    path = directory / names.MANIFEST
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpoint(f"Checkpoint {directory.name} has no manifest", evidence=f"{path} does not exist") from None
    manifest = Manifest.from_bytes(raw, directory.name)
    if manifest.entry.name != directory.name:
        raise CorruptCheckpoint(
            f"Checkpoint {directory.name} holds the manifest of another one", evidence=f"it names {manifest.entry.name}"
        )
    if expect_sha256 and manifest.entry.manifest_sha256 != expect_sha256:
        raise CorruptCheckpoint(
            f"The manifest of {directory.name} is not the one that was committed",
            evidence=f"SHA-256 {manifest.entry.manifest_sha256[:16]}…, the index says {expect_sha256[:16]}…",
        )
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Every file that the manifest names is there with its full length.  Raises :class:`CorruptCheckpoint`; reads no data."""
    for name, about in manifest.files.items():
        try:
            size = os.stat(directory / name).st_size
        except FileNotFoundError:
            raise CorruptCheckpoint(f"Checkpoint {directory.name} lacks {name}", evidence="the file does not exist") from None
        if size != about["bytes"]:
            raise CorruptCheckpoint(
                f"{name} of checkpoint {directory.name} has the wrong length",
                evidence=f"{size} bytes, {about['bytes']} were committed",
            )


def check_declared(directory: Path, items: list[Item], files: dict[str, dict[str, Any]]) -> None:
    """Before a commit: each item lies inside its file, and the items cover the file.  Raises :class:`CheckpointError`."""
    covered: dict[str, int] = {}
    for item in items:
        if item.file not in files:
            raise CheckpointError(f"Item {item.key} lies in {item.file}, which nobody has written")
        covered[item.file] = covered.get(item.file, 0) + item.length
        if item.offset + item.length > files[item.file]["bytes"]:
            raise CheckpointError(f"Item {item.key} ends behind the end of {item.file}", evidence=repr(item))
    for name, about in files.items():
        try:
            size = os.stat(directory / name).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{name} was reported as written and is not there", evidence=str(directory / name)) from None
        if size != about["bytes"]:
            raise CheckpointError(
                f"{name} is not as long as was reported", evidence=f"{size} bytes instead of {about['bytes']}"
            )
        if name != names.METADATA and covered.get(name, 0) != size:
            raise CheckpointError(f"The items in {name} do not cover it", evidence=f"{covered.get(name, 0)} of {size} bytes")
