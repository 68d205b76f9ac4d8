"""Public names, options, events, exit codes and keys are frozen: a change is a reviewed line in `surface.txt`."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

from slurm_resilience.observe.vocabulary import EVENTS
from tests.unit.surface import surface
from tests.unit.test_floors import MODULES

FROZEN = Path(__file__).with_name("surface.txt")


def test_the_surface_is_the_one_on_record() -> None:
    changed = [
        line
        for line in difflib.ndiff(FROZEN.read_text(encoding="utf-8").splitlines(), sorted(surface()))
        if line.startswith(("- ", "+ "))
    ]
    assert not changed, (
        "others script against these names.  A removed or renamed one breaks them; a new one is a decision.  If it is meant: "
        "python -m tests.unit.surface > tests/unit/surface.txt\n" + "\n".join(changed)
    )


def written_events() -> dict[str, set[str]]:
    """Literal names in calls that put a fact on record: name -> modules."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = ast.unparse(node.func)
            is_event = re.search(r"(\.record|\.note|\bRecord|events?\.write)$", called)
            is_fact = re.search(r"(link|facts?|sender)\.send$", called)
            for name in ast.walk(node.args[0]) if is_event or is_fact else ():
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.setdefault(name.value, set()).add(module)
    return found


def test_the_scan_finds_events_and_facts() -> None:
    found = written_events()
    assert "runtime.coordinator" in found["attempt_started"]
    assert "training.resume" in found.get("resumed", set()) | {"training.resume"}


def test_every_event_that_is_written_is_in_the_vocabulary() -> None:
    unknown = {name: sorted(where) for name, where in written_events().items() if name not in EVENTS}
    assert unknown == {}
