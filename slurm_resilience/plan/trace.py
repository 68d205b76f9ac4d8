"""When did things fail?  Failure traces from a CSV file.

The file has a header.  One column is the time: ``t_s``, ``t_min``, ``t_h`` or ``t_days`` since the start, or ISO 8601 ``time``.
``cause`` (default node_lost) and ``node`` may follow; other columns are passed over.  Rows with the cause ``start`` and ``end``
say what the trace covers; without them it goes from 0 (ISO: the first row) to the last row.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Iterable

from slurm_resilience.errors import Cause, ConfigError, nearest
from slurm_resilience.observe.failures import Failure, Trace

_UNITS = {"t_s": 1.0, "t_min": 60.0, "t_h": 3600.0, "t_days": 86_400.0}
_BOUNDS = ("start", "end")


def read_csv(lines: Iterable[str], *, name: str = "the trace") -> Trace:
    """The trace in a CSV file.  Raises :class:`ConfigError` with the line that cannot be read."""
    reader = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    columns = [column.strip() for column in reader.fieldnames or []]
    reader.fieldnames = columns
    times = [column for column in columns if column in _UNITS or column == "time"]
    if len(times) > 1:
        raise ConfigError(
            f"{name} has several columns with times", evidence=", ".join(times), remedy="keep one: the others may say otherwise"
        )
    unit = times[0] if times else None
    if unit is None:
        raise ConfigError(
            f"{name} has no column with times",
            evidence=f"its header is {', '.join(columns) or 'empty'}",
            remedy=f"name one column {', '.join(_UNITS)} (numbers since the start) or time (ISO 8601)",
        )
    rows: list[Failure] = []
    for row in reader:
        cause = (row.get("cause") or Cause.NODE_LOST.value).strip()
        if cause not in _BOUNDS and cause not in {known.value for known in Cause}:
            raise ConfigError(
                f"{name} has an unknown cause {cause!r} in line {reader.line_num}",
                remedy=nearest(cause, [*(known.value for known in Cause), *_BOUNDS]),
            )
        rows.append(Failure(_moment(row[unit] or "", unit, name, reader.line_num), cause, (row.get("node") or "").strip()))
    return _bounded(rows, relative=unit != "time", name=name)


def _moment(text: str, unit: str, name: str, line: int) -> float:
    try:
        if unit != "time":
            value = float(text) * _UNITS[unit]
        else:
            moment = datetime.datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=datetime.timezone.utc)
            value = moment.timestamp()
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name}: {text!r} in line {line} is not a time", evidence=f"it stands in the column {unit}")
    return value


def _bounded(rows: list[Failure], *, relative: bool, name: str) -> Trace:
    if not rows:
        raise ConfigError(f"{name} has no rows", remedy="give at least one failure, or rows with the causes start and end")
    starts = [row.at_s for row in rows if row.cause == "start"]
    ends = [row.at_s for row in rows if row.cause == "end"]
    begin = min(starts) if starts else (0.0 if relative else min(row.at_s for row in rows))
    finish = max(ends) if ends else max(row.at_s for row in rows)
    failures = sorted((row for row in rows if row.cause not in _BOUNDS), key=lambda row: row.at_s)
    if any(not begin <= row.at_s <= finish for row in failures) or finish <= begin:
        raise ConfigError(
            f"{name} has failures outside of the time that it covers, or covers none",
            evidence=f"it goes from {begin:g} to {finish:g} s",
            remedy="check the rows with the causes start and end, and negative times",
        )
    return Trace(tuple(Failure(row.at_s - begin, row.cause, row.node) for row in failures), finish - begin)
