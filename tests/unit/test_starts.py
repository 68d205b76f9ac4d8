"""Each entry point starts without torch, and without what costs a tenth of a second: seen in a fresh interpreter.

A static check would miss an eager ``__init__``, so this asks ``sys.modules`` of a real process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_resilience.cli import COMMANDS
from tests.unit.test_floors import MODULES, TORCH_AT_TOP, within

TORCH = {"torch", "torchdata", "torchvision"}
HEAVY = TORCH | {"numpy", "pydantic", "rich", "jinja2", "submitit", "cloudpickle"}
# Loading these costs what the whole command may cost.
HEAVIEST = HEAVY | {"yaml", "ClusterShell", "asyncio", "multiprocessing", "logging.config"}


def loaded_after(code: str) -> set[str]:
    """All modules in a fresh interpreter after it ran ``code``."""
    report = "\nimport sys as _s\n_s.stderr.write('\\nLOADED' + ' '.join(_s.modules))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("\nLOADED")[2].split())


def main_with(*words: str) -> str:
    return (
        "from slurm_resilience.cli import main\n"
        "try:\n"
        f"    main({list(words)!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code"
    )


def test_the_probe_sees_an_import() -> None:
    assert "colorsys" in loaded_after("import colorsys")
    assert "colorsys" not in loaded_after("")


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        pytest.param("import slurm_resilience", HEAVIEST | {"argparse", "json"}, id="import"),
        pytest.param(main_with("--help"), HEAVIEST, id="help"),
        pytest.param(main_with("--version"), HEAVIEST, id="version"),
        pytest.param("import slurm_resilience.__main__", HEAVIEST, id="main"),
        pytest.param("from slurm_resilience import ResilienceConfig", HEAVY - {"pydantic"}, id="config"),
        pytest.param("from slurm_resilience import ResilientJob, submit_resilient", TORCH | {"numpy", "rich"}, id="submit"),
        pytest.param("import slurm_resilience.runtime.supervisor", HEAVY - {"pydantic"}, id="supervisor"),
        pytest.param("import slurm_resilience.runtime.agent", HEAVY, id="agent"),
        pytest.param("import slurm_resilience.runtime.launcher", HEAVY | {"yaml", "ClusterShell"}, id="launcher"),
        pytest.param("import slurm_resilience.sandbox", HEAVY, id="sandbox"),
        pytest.param("import slurm_resilience.observe.events", HEAVIEST, id="events"),
        pytest.param("import slurm_resilience.progress.page", HEAVIEST, id="page"),
        *(pytest.param(main_with(name, "--help"), HEAVY, id=f"cli-{name}") for name in COMMANDS),
    ],
)  # fmt: skip
def test_an_entry_point_starts_light(code: str, refused: set[str]) -> None:
    assert sorted(loaded_after(code) & refused) == []


def test_no_module_outside_the_torch_places_loads_torch() -> None:
    names = [name for name in MODULES if name and name != "__main__" and not within(name, TORCH_AT_TOP)]
    names += [place for place in TORCH_AT_TOP if place in MODULES and MODULES[place].name == "__init__.py"]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(names)!r}:\n"
        "    importlib.import_module('slurm_resilience.' + name)\n"
        "    assert 'torch' not in sys.modules, f'importing slurm_resilience.{name} loads torch'"
    )
    assert "torch" not in loaded_after(code)
