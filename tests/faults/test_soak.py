"""Nothing is wrong, so nobody is alarmed: slow checkpoints, evaluations and compilations, a stopped agent, a loaded machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import cast
from tests.faults.long_day import COMPILE_AT
from tests.faults.nemesis import newest_step, wait_for
from tests.faults.trial import events_of

LONG_DAY = Path(__file__).with_name("long_day.py")
AGENT_STOPPED_S = 2.0
STEPS = 160


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_long_day_without_an_alarm(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    argv = [
        sys.executable, "-m", "slurm_resilience", "run", "--local", "2", "--run-dir", os.fspath(run_dir),
        "--checkpoint-every", "10", "--", sys.executable, os.fspath(LONG_DAY), str(STEPS), "1.0",
    ]  # fmt: skip
    with open(out, "wb") as log:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/tmp")
    load: list[subprocess.Popen[bytes]] = []
    try:
        wait_for("the long work", lambda: newest_step(run_dir) > COMPILE_AT + 5, 900, say=out.read_text)
        (agent, *_) = [process for node, process in cast.look(run_dir).agents.items() if node == "n2"]
        agent.send(signal.SIGSTOP)
        time.sleep(AGENT_STOPPED_S)
        agent.send(signal.SIGCONT)
        step = newest_step(run_dir)
        wait_for("training after it", lambda: newest_step(run_dir) > step + 5, 120, say=out.read_text)
        load += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
        wait_for("the end under load", lambda: child.poll() is not None, 600, say=out.read_text)
        assert child.returncode == 0, out.read_text()
    finally:
        for each in load:
            each.kill()
            each.wait()
        for process in [*cast.look(run_dir).supervisors, *cast.look(run_dir).agents.values()]:
            process.send(signal.SIGCONT)
            process.send(signal.SIGKILL)
        child.kill()
        child.wait()
    assert events_of(run_dir, "fault_detected", "agent_lost") == []
    assert len(events_of(run_dir, "attempt_started")) == 1
    limits = [event["limits"] for event in events_of(run_dir, "limits_set")]
    assert limits[-1]["step"] < 100, "learned, and not from waiting for the evaluation"  # type: ignore[index]
    slowest = max(float(event["seconds"]) for event in events_of(run_dir, "checkpoint_committed"))  # type: ignore[arg-type]
    assert slowest > 50, "the slow checkpoint really was one"
