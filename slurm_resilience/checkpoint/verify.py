"""Is a checkpoint, byte for byte, what was committed?  Read again in parallel, without torch; the bad tensor has a name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slurm_resilience.checkpoint import marks, names
from slurm_resilience.checkpoint.digest import CHUNK_BYTES, chunk_digest, chunks, sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.manifest import Item, Manifest, read_manifest
from slurm_resilience.errors import FormatError

_OURS = {names.MANIFEST, marks.VERIFIED, marks.QUARANTINED, marks.ATTEMPTED, marks.PINNED, marks.DOUBTED}


@dataclass(frozen=True)
class Problem:
    """One thing that is not as committed: in which file, of which tensor (or ""), and what."""

    file: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key + ': ' if self.key else ''}{self.what}"

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "tensor": self.key, "what": self.what}


def verify(
    directory: Path, entry: Entry | None = None, *, threads: int = 4, progress: Callable[[int], None] = lambda read: None
) -> list[Problem]:
    """Everything that is wrong with the checkpoint in ``directory``; nothing when it is whole.

    ``progress`` is called with the number of bytes read since its last call, from several threads.  Unpickles nothing.
    """
    try:
        manifest = read_manifest(directory, expect_sha256=entry.manifest_sha256 if entry is not None else "")
    except (CorruptCheckpoint, FormatError, OSError) as error:
        return [Problem(names.MANIFEST, "", str(error))]
    problems = list(_foreign(directory, manifest))
    whole = []
    for file, about in manifest.files.items():
        problem = _length(directory / file, int(about["bytes"]))
        if problem:
            problems.append(problem)
        elif "sha256" in about:
            problems += _sha256(directory / file, about["sha256"], progress)
        else:
            whole.append(file)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        work = [item for item in manifest.items if item.file in whole]
        for found in pool.map(lambda item: _item(directory / item.file, item, progress), work):
            problems += found
    return problems


def _foreign(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    for place, folders, listed in os.walk(directory):
        folders.sort()
        below = os.path.relpath(place, directory)
        for name in sorted(listed):
            file = name if below == "." else f"{below}/{name}"
            if file not in manifest.files and file not in _OURS and not name.endswith(".tmp"):
                yield Problem(file, "", "is not part of this checkpoint")


def _length(path: Path, committed: int) -> Problem | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return Problem(path.name, "", "is missing")
    except OSError as error:
        return Problem(path.name, "", f"cannot be read: {error}")
    if size != committed:
        return Problem(path.name, "", f"has {size} bytes, {committed} were committed")
    return None


def _sha256(path: Path, committed: str, progress: Callable[[int], None]) -> list[Problem]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        return [Problem(path.name, "", f"cannot be read: {error}")]
    progress(len(raw))
    return [] if sha256(raw) == committed else [Problem(path.name, "", "its SHA-256 is not the committed one")]


def _item(path: Path, item: Item, progress: Callable[[int], None]) -> list[Problem]:
    problems = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return [Problem(path.name, item.key, str(error))]
    try:
        bad = [number for number, expected in enumerate(chunks(item.digest)) if _chunk(fd, item, number, progress) != expected]
        if bad:
            where = f"in {len(bad)} of {len(chunks(item.digest))} chunks, first at byte {bad[0] * CHUNK_BYTES}"
            problems.append(Problem(path.name, item.key, f"its data is damaged {where}"))
        if item.frame and _frame(fd, item) != item.frame:
            problems.append(Problem(path.name, item.key, "the frame around its data is damaged"))
    except OSError as error:
        problems.append(Problem(path.name, item.key, f"cannot be read: {error}"))
    finally:
        os.close(fd)
    return problems


def _chunk(fd: int, item: Item, number: int, progress: Callable[[int], None]) -> str:
    start = number * CHUNK_BYTES
    raw = os.pread(fd, min(CHUNK_BYTES, item.data_length - start), item.data_offset + start)
    progress(len(raw))
    return chunk_digest(raw)


def _frame(fd: int, item: Item) -> str:
    """The digest of the record without the tensor's own bytes."""
    running = xxhash.xxh3_64()
    data_end = item.data_offset + item.data_length
    running.update(os.pread(fd, item.data_offset - item.offset, item.offset))
    running.update(os.pread(fd, item.offset + item.length - data_end, data_end))
    return running.hexdigest()
