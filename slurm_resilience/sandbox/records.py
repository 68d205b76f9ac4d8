"""Reading what `scontrol -o show` prints.  Pure."""

from __future__ import annotations

import re

_OUT_OF_TOUCH = ("*", "NOT_RESPONDING", "UNKNOWN")
_OUT_OF_SERVICE = ("DRAIN", "DOWN", "FAIL", *_OUT_OF_TOUCH)
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|\s*$)")


def fields(line: str) -> dict[str, str]:
    """``A=1 B=two words C=`` as a mapping.  A word without a key belongs to the value before it.  Source: scontrol -o."""
    out: dict[str, str] = {}
    for match in _FIELD.finditer(line):
        out.setdefault(match.group(1), match.group(2).strip())
    return out


def in_touch(word: str) -> bool:
    """Does this word for a node's state, such as IDLE+DRAIN or DOWN*, say that slurmctld and its slurmd hear each other?"""
    return bool(word) and not any(bad in word for bad in _OUT_OF_TOUCH)


def in_service(word: str) -> bool:
    """Does it say that the node takes jobs?"""
    return bool(word) and not any(bad in word for bad in _OUT_OF_SERVICE)
