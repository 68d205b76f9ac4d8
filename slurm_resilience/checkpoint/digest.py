"""Digests that find accidents: xxh3 over chunks of a fixed size, so that a partial read verifies what it reads.

They authenticate nothing; what is unpickled is covered by SHA-256 and by owner and mode (see trust.py).
"""

from __future__ import annotations

import hashlib

import xxhash

CHUNK_BYTES = 4 << 20
_HEX = 16


def chunk_digest(data: bytes | bytearray | memoryview) -> str:
    """The digest of one chunk: 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def digest(data: bytes | bytearray | memoryview) -> str:
    """The digests of all chunks of ``data``, one after the other; "" for no data."""
    view = memoryview(data).cast("B")
    if len(view) <= CHUNK_BYTES:
        return chunk_digest(view) if len(view) else ""
    return "".join(chunk_digest(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES))


def chunks(joined: str) -> list[str]:
    """The single digests of a joined string."""
    return [joined[at : at + _HEX] for at in range(0, len(joined), _HEX)]


def sha256(data: bytes | bytearray | memoryview) -> str:
    """The digest for what must not be replaced by somebody else."""
    return hashlib.sha256(data).hexdigest()
