"""What was found out about a checkpoint after its commit, kept in its own directory, so that the index can be lost.

One small JSON file a mark, written atomically.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint.bench import Bench
from slurm_resilience.checkpoint.entry import Entry, State

VERIFIED = ".verified.json"
QUARANTINED = ".quarantined.json"
ATTEMPTED = ".attempted.json"
PINNED = ".pinned.json"
DOUBTED = ".doubted.json"
MOST_EXCUSES = 2


def put(bench: Bench, directory: Path, mark: str, about: dict[str, Any]) -> None:
    """Set one mark, durably."""
    bench.put_json(directory / mark, about)


def drop(bench: Bench, directory: Path, mark: str) -> None:
    """Take one mark away; nothing happens where there is none."""
    bench.remove(directory / mark)


def get(directory: Path, mark: str) -> dict[str, Any] | None:
    """What a mark says, None where there is none.  A damaged mark still counts as set: it says so, and nothing else."""
    path = directory / mark
    if not os.path.exists(path):
        return None
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError, RecursionError):
        return {"damaged": True}
    return value if isinstance(value, dict) else {"damaged": True}


def blamed(attempted: dict[str, Any]) -> list[int]:
    """The attempts that began to load and whose end may be this checkpoint's fault.  A damaged mark blames one unknown.

    Excuses are believed MOST_EXCUSES times: what kills a node or a process whenever it is loaded is not innocent.
    """
    begun, excused = attempted.get("begun"), attempted.get("excused", [])
    if not isinstance(begun, list) or not isinstance(excused, list) or not all(isinstance(one, int) for one in begun):
        return [-1]
    return begun if len(begun) > MOST_EXCUSES else [attempt for attempt in begun if attempt not in excused]


def apply(entry: Entry, directory: Path) -> Entry:
    """The entry as the marks in its directory make it.  A damaged "verified" proves nothing and is passed over."""
    verified, quarantined = get(directory, VERIFIED), get(directory, QUARANTINED)
    attempted, doubted = get(directory, ATTEMPTED), get(directory, DOUBTED)
    state, by, reason = State.COMMITTED, "", ""
    if verified is not None and "damaged" not in verified:
        state, by = State.VERIFIED, str(verified.get("by", ""))
    if quarantined is not None:
        state, by = State.QUARANTINED, str(quarantined.get("by", ""))
        reason = str(quarantined.get("reason", "its quarantine mark is damaged"))
    count = 0 if attempted is None else len(blamed(attempted))
    doubt = "" if doubted is None else str(doubted.get("reason", "its mark of doubt is damaged"))
    pinned = get(directory, PINNED) is not None
    return entry.with_marks(state=state, by=by, reason=reason, attempts=count, pinned=pinned, doubt=doubt)
