"""What every node starts with stays small: no third-party package, no import of the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_resilience.sandbox.node import _program


@pytest.mark.parametrize("module", ["init", "enter"])
def test_it_starts_without_site_packages(module: str) -> None:
    line = _program(module)
    assert line[:3] == [sys.executable, "-I", "-S"]
    code = line[4].replace("import main; main()", "import main; print(*sorted(sys.modules))")
    loaded = subprocess.run([*line[:4], code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith("slurm_resilience")}
    assert ours <= {
        "slurm_resilience",
        "slurm_resilience.errors",
        "slurm_resilience.sandbox",
        f"slurm_resilience.sandbox.{module}",
        "slurm_resilience.sandbox.kernel",
        "slurm_resilience.sandbox.processes",
    }


@pytest.mark.parametrize("module", ["init", "enter"])
def test_a_host_that_cannot_be_is_one_line_and_not_a_traceback(module: str) -> None:
    spec = '{"cgroup": null, "netns": "/nonexistent", "pid": 0, "start": 0, "host": "n1"}'
    result = subprocess.run([*_program(module), spec], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
