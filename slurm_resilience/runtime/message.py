"""What every message between agent and supervisor is: a dataclass, one line of JSON, and a proof of who speaks."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from typing import ClassVar

from slurm_resilience.errors import FormatError

WIRE_VERSION = 1
MAX_LINE_BYTES = 1 << 20
BEAT_EVERY_S = 0.5


class WireError(FormatError):
    """A message cannot be sent, or was not one of ours."""


@dataclass(frozen=True)
class Message:
    """Base of all messages; ``kind`` is the word on the wire."""

    kind: ClassVar[str] = ""

    def to_line(self) -> bytes:
        """One line with its newline.  Raises :class:`WireError` when it would be over the limit."""
        raw = json.dumps({"m": self.kind, **vars(self)}, separators=(",", ":")).encode() + b"\n"
        if len(raw) > MAX_LINE_BYTES:
            raise WireError(f"a {self.kind!r} message of {len(raw)} bytes is over the limit of {MAX_LINE_BYTES}")
        return raw


@dataclass(frozen=True)
class Garbage(Message):
    """A line that was not one of our messages; never sent.  ``why`` is evidence for the log."""

    kind: ClassVar[str] = ""
    why: str


def proof_of(token: str, role: str, nonce: str, node: str) -> str:
    """What only somebody who knows the token can say about this nonce."""
    return hmac.new(token.encode(), f"{role}\0{nonce}\0{node}".encode(), "sha256").hexdigest()
