"""How things in a checkpoint root are called, so that nothing unfinished can be taken for a checkpoint.

    step-00000020-a00003-5f3a9c01/     a committed checkpoint; the name is never used twice
    .writing-a00003/                   saves that attempt 3 is writing; what is in there never counts
    .gone/                             abandoned and pruned directories on their way out
    head.json  head.next.json          the index (see index.py)
    history.jsonl                      what happened to each entry, append-only
    fence/                             which attempt owns the root (see fence.py)

A committed name is matched from end to end and ordered by attempt and step, never by text or by time.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

MANIFEST = "manifest.json"
METADATA = ".metadata"
HEAD = "head.json"
NEXT_HEAD = "head.next.json"
HISTORY = "history.jsonl"
FENCE = "fence"
LOCK = ".lock"
EXISTENCE_LOCK = ".lock.held"
GONE = ".gone"
LEASES = ".reading"

_NAME = re.compile(r"step-(\d{8,})-a(\d{5,})-([0-9a-f]{8})")
_WRITING = re.compile(r"\.writing-a(\d{5,})")


class Parsed(NamedTuple):
    """What a committed directory's name says."""

    step: int
    attempt: int
    unique: str


def new_name(step: int, attempt: int) -> str:
    """A name that no save has had before."""
    return f"step-{step:08d}-a{attempt:05d}-{secrets.token_hex(4)}"


def parse(name: str) -> Parsed | None:
    """The parts of a committed directory's name; None for everything else, temporary names included."""
    match = _NAME.fullmatch(name)
    return Parsed(int(match[1]), int(match[2]), match[3]) if match else None


def writing_dir(attempt: int) -> str:
    """Where an attempt's unfinished saves live."""
    return f".writing-a{attempt:05d}"


def parse_writing(name: str) -> int | None:
    """The attempt whose unfinished saves live in this directory."""
    match = _WRITING.fullmatch(name)
    return int(match[1]) if match else None


def shard_file(rank: int) -> str:
    """The file that one rank writes; DCP's own naming, so that plain ``dcp.load`` reads it too."""
    return f"__{rank}_0.distcp"
