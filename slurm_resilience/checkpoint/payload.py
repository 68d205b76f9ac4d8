"""Files that somebody else has written, as they lie in a checkpoint: measured, digested, made durable; and found again.

What a framework writes keeps its names, below one folder of the checkpoint; we know nothing of what is inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import fsync_dir
from slurm_resilience.checkpoint.digest import CHUNK_BYTES, chunk_digest
from slurm_resilience.checkpoint.manifest import Item
from slurm_resilience.errors import CheckpointError

FOLDER = "files"


def take(directory: Path) -> tuple[dict[str, dict[str, Any]], list[Item]]:
    """Files and items for the manifest of what lies in ``directory/files``; all of it is on the disk when this returns.

    Raises :class:`CheckpointError` for an empty folder, and for links and other things that are no files.
    """
    files: dict[str, dict[str, Any]] = {}
    items: list[Item] = []
    for path in _walk(directory / FOLDER):
        name = path.relative_to(directory).as_posix()
        digests, size = _digest(path)
        files[name] = {"bytes": size}
        if size:
            items.append(Item(name, name, 0, size, 0, size, digests))
    if not files:
        raise CheckpointError("The framework has written no file", evidence=f"{directory / FOLDER} is empty")
    return files, items


def _walk(folder: Path) -> Iterator[Path]:
    """All files below, in order; folders are made durable on the way."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *(one for one in folders if os.path.islink(os.path.join(place, one)))]):
            path = Path(place, name)
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(
                    f"{path} is no plain file", evidence="a checkpoint holds its own data, no links to others'"
                )
            yield path
        fsync_dir(place)


def _digest(path: Path) -> tuple[str, int]:
    """The digests of the file's chunks, and its length; the file is on the disk afterwards."""
    digests, size = [], 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digests.append(chunk_digest(chunk))
            size += len(chunk)
        os.fsync(file.fileno())
    return "".join(digests), size
