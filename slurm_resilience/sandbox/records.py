"""Reading what `scontrol -o show` prints.  Pure."""

from __future__ import annotations

import re

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|\s*$)")


def fields(line: str) -> dict[str, str]:
    """``A=1 B=two words C=`` as a mapping.  A word without a key belongs to the value before it.  Source: scontrol -o."""
    out: dict[str, str] = {}
    for match in _FIELD.finditer(line):
        out.setdefault(match.group(1), match.group(2))
    return out
