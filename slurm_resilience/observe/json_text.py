"""JSON that every reader takes: a number that is none (a loss of NaN) is null, as JSON has no word for it."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """One document.  What JSON does not know becomes its text."""
    try:
        return json.dumps(value, default=str, indent=indent, allow_nan=False)
    except ValueError:  # only then is it worth looking at every value
        return json.dumps(_finite(value), default=str, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
