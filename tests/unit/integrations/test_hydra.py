"""A sweep of the real Hydra: each task is a run of its own, comes back after a fault, and gives its result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.observe.events import read_events
from tests.unit.integrations.frameworks import EXAMPLES


@pytest.mark.timeout(600)
def test_a_sweep_survives_a_fault_and_each_task_has_its_result(tmp_path: Path) -> None:
    folder = tmp_path.parent  # Hydra reads odd characters of a path as its own grammar
    command = [
        sys.executable, str(EXAMPLES / "with_hydra.py"), "-m", "hydra/launcher=resilient", "hydra.launcher.cluster=local",
        "hydra.launcher.nodes=1",
        "+hydra.launcher.config.checkpoint.every_steps=5", f"hydra.sweep.dir={folder / 'sweep'}", "steps=20", "fail_at=-1,12",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = sorted((folder / "sweep" / ".resilient").glob("*/events.jsonl"))
    assert len(runs) == 2
    said = done.stdout + done.stderr
    assert all(str(run.parent) in said for run in runs), said[-2000:]
    assert said.count("complete, it returned") == 2
    ends = []
    for run in runs:
        seen = list(read_events(run.parent))
        assert seen[-1]["event"] == "run_completed" or any(event["event"] == "run_completed" for event in seen)
        ends.append([event["step"] for event in seen if event["event"] == "resumed"])
    assert sorted(ends) == [[], [10]], "one task failed once and went on from its checkpoint"
    outputs = (folder / "sweep").glob("*/.hydra/overrides.yaml")
    assert sorted(path.parent.parent.name for path in outputs) == ["0", "1"]


@pytest.mark.timeout(600)
def test_a_task_that_fails_does_not_cost_the_others(tmp_path: Path) -> None:
    folder = tmp_path.parent
    command = [
        sys.executable, str(EXAMPLES / "with_hydra.py"), "-m", "hydra/launcher=resilient", "hydra.launcher.cluster=local",
        "hydra.launcher.nodes=1", f"hydra.sweep.dir={folder / 'failing'}", "steps=3", "lr=none-such,1e-3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said[-3000:]
    assert "#0: failed, its run is in" in said, said[-3000:]
    assert "#1: complete, it returned" in said, said[-3000:]
    assert "JobFailed" in said, said[-2000:]
