"""Writing files so that a reader, a crash or a power loss never sees half of one."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable.  Some file systems refuse (EINVAL); then there is nothing to do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        import errno

        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_atomic(path: str | os.PathLike[str], data: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace ``path`` by ``data``: all of it or nothing, also after a power loss when ``durable``.

    The temporary file is unique, in the same directory, and gone when the write failed.
    """
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)


def write_output(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file that somebody has named: a regular or new one as a whole, anything else by opening it.

    Never replaces a device, a pipe or a link: for root, ``/dev/null`` would become an ordinary file for the whole machine.
    """
    path = Path(path)
    if path.exists() and (path.is_symlink() or not path.is_file()):
        with open(path, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
    else:
        write_atomic(path, data, durable=False)


def write_json_atomic(path: str | os.PathLike[str], value: Any, *, mode: int = 0o644, durable: bool = True) -> None:
    """:func:`write_atomic` of one JSON document; NaN and Infinity are refused, since they are not JSON."""
    write_atomic(path, json.dumps(value, allow_nan=False, sort_keys=True) + "\n", mode=mode, durable=durable)


def read_json(path: str | os.PathLike[str]) -> Any | None:
    """The document in ``path``; None where there is no such file.  Raises ValueError when it is torn."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    return json.loads(raw)
