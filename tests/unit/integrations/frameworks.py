"""Runs of the framework examples on pretend nodes, with and without a fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_resilience.observe.events import read_events
from slurm_resilience.training.metrics import history
from tests.faults.nemesis import wait_for

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"
START_S, END_S = 300.0, 300.0


def command(run_dir: Path, name: str, steps: int, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "slurm_resilience", "run", "--local", "2", "--nodes", "2", "--run-dir", str(run_dir),
        *options, "--", sys.executable, str(EXAMPLES / f"with_{name}.py"), "--steps", str(steps), "--sleep", "0.1",
    ]  # fmt: skip


@contextmanager
def started(run_dir: Path, name: str, steps: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The run; whatever is left of it is killed at the end."""
    with open(run_dir.with_name(f"{run_dir.name}.log"), "w") as log:
        child = subprocess.Popen(
            command(run_dir, name, steps, *options), stdout=log, stderr=log, text=True, start_new_session=True
        )
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
                try:
                    child.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()


def finished(child: subprocess.Popen[str], run_dir: Path) -> None:
    code = child.wait(END_S)
    assert code == 0, run_dir.with_name(f"{run_dir.name}.log").read_text()


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == name]


def kill_a_rank_after(child: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """SIGKILL for rank 1 as soon as a checkpoint of ``step`` or later is committed and training has gone on."""

    say = run_dir.with_name(f"{run_dir.name}.log").read_text

    def reached() -> bool:
        assert child.poll() is None, say()
        saved = [event["step"] for event in events(run_dir, "checkpoint_committed")]
        return bool(saved) and max(saved) >= step and max(history(run_dir), default=0) > max(saved)

    wait_for("a checkpoint and a step after it", reached, START_S, say=say)
    pids = {rank: pid for node in events(run_dir, "ranks_launched")[-1]["pids"].values() for rank, pid in node.items()}
    os.kill(int(pids["1"]), signal.SIGKILL)


def losses(run_dir: Path) -> dict[int, float]:
    """The last word on the loss of each step."""
    return {step: float(line["loss"]) for step, line in history(run_dir).items() if "loss" in line}


def describe(run_dir: Path) -> str:
    return json.dumps([event for event in read_events(run_dir) if event["event"] != "step_reported"], indent=1)
