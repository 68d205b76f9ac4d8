"""Ranks in a real container and in an environment module, on a real Slurm: a rank is killed, the job is preempted.

The container is Charliecloud's, over a root of Debian without Slurm; both packages come from the distribution.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_resilience
from slurm_resilience.sandbox import Sandbox
from tests.slurm.test_templates import Submit, ends_well, events, submit, survive

__all__ = ["submit"]
TREE = Path(__file__).parents[2]
IMAGE = Path("/opt/slurm-resilience/roots/container")
MODULES = Path("/etc/profile.d/modules.sh")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def image() -> Path:
    """A root of this machine's Debian with Python, and folders to mount what the ranks need."""
    if shutil.which("ch-run") is None:
        pytest.skip("not run: no charliecloud here")
    script = '. .ci/setup.sh; . .ci/other-slurm.sh; make_root bookworm "$0" "python3,$PYTHON_PACKAGES"'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, str(IMAGE)], cwd=TREE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (IMAGE / "usr/bin/scontrol").exists()
    return IMAGE


def test_ranks_in_a_container_survive(image: Path, sandbox: Sandbox, shared: Path, submit: Submit) -> None:
    installed = Path(slurm_resilience.__file__).parents[1]  # of an editable installation, maybe another checkout
    seen = sorted({str(TREE), str(installed), sys.prefix, str(shared)})  # /tmp and /dev/shm are seen inside as they are
    for folder in seen:
        (image / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    rank = shared / "inside.py"
    rank.write_text(
        "import os, runpy, sys\nassert not os.path.exists('/usr/bin/scontrol'), 'outside'\n"
        f"sys.path.insert(0, {str(TREE)!r})\nrunpy.run_path({str(TREE / 'tests/slurm/cheap_rank.py')!r}, run_name='__main__')\n"
    )
    container = " ".join(["ch-run", *(f"--bind={folder}:{folder}" for folder in seen), "{image}", "--"])
    job, run_dir = submit(
        "container", command=f"{sys.executable} {rank}", nodes="1-2", ranks_per_node="2", options="--set preload=[]",
        container=container, image=str(image), setup="export USER=alice",
    )  # fmt: skip
    steps = survive(sandbox, shared, job, run_dir)
    assert 0 < steps[0] < steps[1]
    (run_dir / "enough").touch()
    ends_well(sandbox, shared, job)
    assert len(events(run_dir, "started_fresh")) == 1


@pytest.fixture
def modules(shared: Path) -> Path:
    """A folder with one module, ``train/1.0``, which alone knows where the training code is."""
    if not MODULES.exists():
        pytest.skip("not run: no environment-modules here")
    code = shared / "code"
    code.mkdir()
    shutil.copy(Path(__file__).parent / "cheap_rank.py", code / "train.py")
    folder = shared / "modules"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "1.0").write_text(f"#%Module1.0\nprepend-path PYTHONPATH {code}\n")
    return folder


def test_a_module_is_loaded_in_every_allocation(modules: Path, sandbox: Sandbox, shared: Path, submit: Submit) -> None:
    job, run_dir = submit(
        "multi-node", command=f"{sys.executable} -m train", nodes="1-2", ranks_per_node="2", options="--set preload=[]",
        setup=f"source {MODULES}; module use {modules}; module load train",
    )  # fmt: skip
    steps = survive(sandbox, shared, job, run_dir)
    assert 0 < steps[0] < steps[1]
    (run_dir / "enough").touch()
    ends_well(sandbox, shared, job)
    assert len(events(run_dir, "started_fresh")) == 1
