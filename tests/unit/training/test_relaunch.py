"""The promise itself, by real relaunches: nodes go and come back, and the loss curve is that of one undisturbed process.

`slurm-resilience run --local` with real agents, launchers and ranks.  Supervisor and agents are killed with SIGKILL at some
step, and the next supervisor finds another number of nodes in the same run folder, as after a requeue.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.training.metrics import history
from tests.faults import cast

GPT = Path(__file__).resolve().parents[3] / "examples" / "gpt" / "train.py"
STEPS = 200
WORLDS = ((4, 53), (3, 101), (2, 148), (4, None))  # nodes, and the step from which on everything is killed
DEADLINE_S = 900.0


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def furthest(mine: dict[int, Any], theirs: dict[int, Any], name: str) -> float:
    assert list(mine) == list(theirs) == list(range(1, STEPS + 1))
    return max(abs(mine[step][name] - theirs[step][name]) / abs(theirs[step][name]) for step in theirs)


def newest_step(run_dir: Path) -> int:
    return max(history(run_dir), default=0)


def kill_all(run_dir: Path, supervisor: subprocess.Popen[bytes]) -> None:
    """SIGKILL to supervisor and agents; their launchers and ranks end with them."""
    seen = cast.look(run_dir)
    for process in [*seen.supervisors, *seen.agents.values()]:
        process.send(signal.SIGKILL)
    supervisor.wait(90)
    deadline = time.monotonic() + 90
    while cast.look(run_dir).ranks:
        assert time.monotonic() < deadline, "ranks outlive their agents"
        time.sleep(0.05)


def relaunch(run_dir: Path, nodes: int, kill_from: int | None, batch: tuple[int, int], log: Path) -> None:
    argv = [
        sys.executable, "-m", "slurm_resilience", "run", "--local", str(nodes), "--nodes", "2-4", "--run-dir", str(run_dir),
        "--global-batch", str(batch[0]), "--micro-batch", str(batch[1]), "--checkpoint-every", "9",
        "--", sys.executable, str(GPT), "--steps", str(STEPS), "--validate-every", "0",
    ]  # fmt: skip
    with open(log, "ab") as out:
        supervisor = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment())
    deadline = time.monotonic() + DEADLINE_S
    try:
        while supervisor.poll() is None and (kill_from is None or newest_step(run_dir) < kill_from):
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        if kill_from is None:
            assert supervisor.returncode == 0, log.read_text()[-3000:]
        else:
            assert supervisor.poll() is None, log.read_text()[-3000:]
    finally:
        kill_all(run_dir, supervisor)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("global_batch", "micro_batch"), [(48, 4), (46, 4)], ids=["divides", "divides_by_nothing"])
def test_four_three_two_four_nodes_draw_the_curve_of_one_process(
    tmp_path: Path, global_batch: int, micro_batch: int, record_property: Any
) -> None:
    alone = [
        sys.executable, str(GPT), "--steps", str(STEPS), "--validate-every", "0", "--folder", str(tmp_path / "one"),
        "--global-batch", str(global_batch), "--micro-batch", str(micro_batch),
    ]  # fmt: skip
    subprocess.run(alone, env=environment(), check=True, capture_output=True, timeout=DEADLINE_S)
    run_dir = tmp_path / "many"
    for nodes, kill_from in WORLDS:
        relaunch(run_dir, nodes, kill_from, (global_batch, micro_batch), tmp_path / "log")

    one, many = history(tmp_path / "one"), history(run_dir)
    events = list(read_events(run_dir))
    worlds = [event["world"] for event in events if event["event"] == "attempt_started"]
    # A machine that starves an agent for seconds makes for a relaunch more, on the same nodes: it may change nothing either
    assert [world for world, _ in itertools.groupby(worlds)] == [4, 3, 2, 4]
    resumed = [event["step"] for event in events if event["event"] == "resumed"]
    assert len(resumed) == len(worlds) - 1
    assert all(any(kill - 9 <= step <= kill for step in resumed) for _, kill in WORLDS if kill)
    # The norm of the gradients is no part of the promise: where they nearly cancel, the rounding of the weights shows in it.
    for name, most in (("loss", 1e-5), ("lr", 0), ("samples", 0), ("grad_norm", 1e-3)):
        distance = furthest(many, one, name)
        record_property(f"furthest_{name}", distance)
        assert distance <= most, name
