"""Everything that others script against, one line a name: what `test_frozen.py` compares with `surface.txt`.

python -m tests.unit.surface > tests/unit/surface.txt      after a change that was meant
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import slurm_resilience
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import EXIT_CODE_OF, Cause, ExitCode
from slurm_resilience.observe.vocabulary import EVENTS
from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.page import Phase

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "generate.py"


def reference() -> ModuleType:
    """The program that prints the reference pages; it already knows how to walk commands and keys."""
    spec = importlib.util.spec_from_file_location("reference_generate", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def surface() -> Iterator[str]:
    generate = reference()
    for name in slurm_resilience.__all__:
        yield f"python from slurm_resilience import {name}"
    for name, parser in generate.parsers():
        yield name
        for spelled, _ in generate.options(parser):
            yield f"{name} {spelled}"
    for key, field in generate.config_keys(ResilienceConfig):
        yield f"config {key}: {generate.type_name(field.annotation)} = {field.default!r}"
    for name, meaning in EVENTS.items():
        yield f"event {name}"
        for field in meaning.fields:
            yield f"event {name}.{field}"
    for code in ExitCode:
        yield f"exit code {int(code)} {code.name}"
    for cause in Cause:
        yield f"cause {cause} -> {int(EXIT_CODE_OF[cause])}"
    for name in RankContract._NAMES.values():
        yield f"environment {name}"
    for phase in Phase:
        yield f"phase {int(phase)} {phase.name}"


if __name__ == "__main__":
    print("\n".join(sorted(surface())))
