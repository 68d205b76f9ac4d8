"""How checkpoints are told: what is printed, made harmless first, since names and reasons may come from anywhere."""

from __future__ import annotations

from typing import Any

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.verify import Problem
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.json_text import dumps

MOST_PROBLEMS = 20
_MOST_CHARS = 300


def say(line: str) -> None:
    print(printable(line))


def short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"


def printable(text: str) -> str:
    """``text`` without what a terminal would obey or could not show: control characters, halves of characters."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def in_short(problems: list[Problem]) -> str:
    more = f" ({len(problems)} problems)" if len(problems) > 3 else ""
    return "; ".join(map(str, problems[:3])) + more


def describe(entry: Entry) -> dict[str, Any]:
    return {"usable": entry.usable, **entry.to_json(), "state": str(entry.state)}


def print_json(document: Any) -> int:
    print(dumps(document))
    return ExitCode.OK
