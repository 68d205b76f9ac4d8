"""The shipped templates are found where each kind of installation puts them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_resilience
from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.templates import template_path

PACKAGE = Path(slurm_resilience.__file__).parent


def test_in_a_checkout() -> None:
    assert template_path().name == "resilient.sbatch"
    with pytest.raises(ConfigError, match="is not there"):
        template_path("nope.sbatch")


def test_in_an_installed_wheel(tmp_path: Path) -> None:
    """pyproject.toml maps sbatch/ to slurm_resilience/_sbatch; a checkout that happens to be beside must not be needed."""
    site = tmp_path / "site-packages"
    shutil.copytree(PACKAGE, site / "slurm_resilience", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "sbatch", site / "slurm_resilience" / "_sbatch")
    code = "from slurm_resilience.submit.templates import template_path; print(template_path())"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == f"{site}/slurm_resilience/_sbatch/resilient.sbatch\n", done.stderr
    mapping = (PACKAGE.parent / "pyproject.toml").read_text()
    assert '"sbatch" = "slurm_resilience/_sbatch"' in mapping
