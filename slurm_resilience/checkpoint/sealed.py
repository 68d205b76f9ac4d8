"""JSON documents that know when they were torn or edited: ``{"body":…,"sha256":"…"}``, the digest over the body's bytes.

Plain JSON for every other program; for us one hash tells a whole document from a damaged one, without parsing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

_OPEN = b'{"body":'
_MIDDLE = b',"sha256":"'
_CLOSE = b'"}\n'
_TAIL_BYTES = len(_MIDDLE) + 64 + len(_CLOSE)


class Broken(ValueError):
    """The document is not what was written."""


def seal(body: Any) -> bytes:
    """The document's bytes.  Floats that JSON does not know (nan, inf) survive the round trip."""
    raw = json.dumps(_plain(body), allow_nan=False, separators=(",", ":")).encode()
    return _OPEN + raw + _MIDDLE + hashlib.sha256(raw).hexdigest().encode() + _CLOSE


def unseal(raw: bytes) -> Any:
    """The body of a document.  Raises :class:`Broken` when one byte of it is not as it was sealed."""
    if len(raw) < len(_OPEN) + _TAIL_BYTES or not raw.startswith(_OPEN) or not raw.endswith(_CLOSE):
        raise Broken(
            f"{len(raw)} bytes without the form of a sealed document" if raw.strip(b"\0") else f"{len(raw)} bytes, all zero"
        )
    body, tail = raw[len(_OPEN) : -_TAIL_BYTES], raw[-_TAIL_BYTES:]
    digest = tail[len(_MIDDLE) : -len(_CLOSE)].decode("ascii", "replace")
    if not tail.startswith(_MIDDLE) or hashlib.sha256(body).hexdigest() != digest:
        raise Broken("its digest does not match its content")
    try:
        return _rich(json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:  # somebody has sealed what we never wrote
        raise Broken(f"not JSON of ours: {error}") from None


def read(path: str | os.PathLike[str]) -> Any | None:
    """The body of the document in ``path``, None where there is none.  Raises :class:`Broken`."""
    try:
        raw = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return unseal(raw)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key: _rich(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rich(inner) for inner in value]
    return value
