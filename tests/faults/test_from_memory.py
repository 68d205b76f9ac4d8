"""A rank dies and its node does not: the run goes on from the copy in the node's memory, and its record says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.checkpoint.dcp.local import default_base
from slurm_resilience.training.metrics import history
from tests.faults.nemesis import Fault, Nemesis, newest_step, wait_for
from tests.faults.trial import END_S, GPT, START_S, STEP_S, events_of

STEPS = 45


def run(run_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    words = [
        sys.executable, "-m", "slurm_resilience", "run", "--local", "2", "--run-dir", os.fspath(run_dir), "--nodes", "2",
        "--global-batch", "12", "--micro-batch", "3", "--checkpoint-every", "20", "--set", "checkpoint.local_every_steps=1",
        "--", sys.executable, os.fspath(GPT), "--steps", str(STEPS), "--sleep", "0.05", "--validate-every", "0",
    ]  # fmt: skip
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT, cwd="/tmp")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_rank_costs_a_step_or_two(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with run(run_dir, log) as supervisor:
        try:
            wait_for("the first step", lambda: bool(events_of(run_dir, "first_step")), START_S, say=log.read_text)
            nemesis = Nemesis(run_dir, "n1")
            for step in (8, 31):  # before any shared checkpoint, and long after one
                nemesis.fire(Fault("rank", False, step, 0.0, 0), within_s=STEP_S, say=log.read_text)
                attempts = len(events_of(run_dir, "first_step"))
                wait_for("the return", lambda n=attempts: len(events_of(run_dir, "first_step")) > n, STEP_S, say=log.read_text)
            wait_for("the end", lambda: supervisor.poll() is not None, END_S, say=log.read_text)
        finally:
            supervisor.kill()
    assert supervisor.returncode == 0, log.read_text()
    resumed = events_of(run_dir, "resumed")
    assert [event["tier"] for event in resumed] == ["local", "local"]
    assert [int(str(event["step"])) >= killed - 1 for event, killed in zip(resumed, (8, 31), strict=True)] == [True, True]
    assert list(history(run_dir)) == list(range(1, STEPS + 1))
    assert newest_step(run_dir) == STEPS
    committed = events_of(run_dir, "checkpoint_committed")
    assert [event["step"] for event in committed] == [20, 40, 45]
    (run_id,) = {str(event["run_id"]) for event in events_of(run_dir, "run_started")}
    assert not (default_base() / run_id).exists(), "copies are left behind"
