"""Two crashes on two nodes, and a third one is the bad one: a check on a real cluster finds it, and the run does without."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ResilienceError
from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox

CRASHES = """
    import os, signal, sys, time
    if (os.environ["RESILIENCE_ATTEMPT"], os.environ["RANK"]) in (("1", "0"), ("2", "1")):
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(3.0)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_stands_still_is_found_after_two_crashes_elsewhere(sandbox: Sandbox, shared: Path) -> None:
    script, run_dir = shared / "crashes.py", shared / "run"
    script.write_text(textwrap.dedent(CRASHES))
    command = [sys.executable, "-m", "slurm_resilience", "run", "--run-dir", os.fspath(run_dir), "--nodes", "2-4", "--cold"]
    command += ["--set", "limits.check_s=40", "--", sys.executable, os.fspath(script)]
    batch = ["sbatch", "--parsable", "--nodes=4", "--exclusive", "--no-kill", "--output=out", f"--wrap={' '.join(command)}"]
    job = sandbox.exec(batch, cwd=shared, check=True).stdout.strip()

    def events() -> list[dict[str, Any]]:
        return [dict(event) for event in read_events(run_dir)]

    def newest(name: str) -> dict[str, Any]:
        return next((event for event in reversed(events()) if event["event"] == name), {})

    sandbox.wait_for(lambda: newest("node_check_started"), 180, what="the check of the nodes")

    def stopped() -> bool:
        try:
            return bool(sandbox.fault("hang-rank", job=job, index=2))
        except ResilienceError:
            return False

    sandbox.wait_for(stopped, 90, what="a process of the check on n3", every=0.02)
    sandbox.wait_for(lambda: newest("node_check_done"), 90, what="the verdict")
    done = newest("node_check_done")
    assert done["suspects"] == {"n3": "it said nothing in a check in which the others did"}, done
    sandbox.wait_for(lambda: newest("run_completed"), 120, what="the end of the run")
    started = {event["attempt"]: event["nodes"] for event in events() if event["event"] == "attempt_started"}
    assert list(started)[:3] == [1, 2, 4], events()
    assert started[4] == ["n1", "n2", "n4"]
    sandbox.wait_for(lambda: sandbox.job_state(job) == "COMPLETED", 150, what="the end of the job")
