"""Jobs that are hard to end: preempted, they leave no process behind, and no node is drained for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox
from slurm_resilience.sandbox.processes import Process, all_pids

PROGRAMS = {
    # hears nothing, and has a child in a session of its own that does not, either
    "ignoring": """
import pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["bash", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], start_new_session=True)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(1)
""",
    "loaders": """
import pathlib, sys, torch
from torch.utils.data import DataLoader
from slurm_resilience import Run
run = Run()
model = torch.nn.Linear(1, 1)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
run.resume()
samples = iter(DataLoader(torch.arange(1 << 22, dtype=torch.float32), batch_size=1, num_workers=8))
for step in run.steps(1 << 20):
    next(samples)
    run.report(loss=0.0)
    if step == 3:
        pathlib.Path(sys.argv[1]).touch()
""",
    # as a compiler does: a call that takes a minute, in other processes
    "compiling": """
import pathlib, subprocess, sys
pathlib.Path(sys.argv[1]).touch()
subprocess.run(["bash", "-c", "trap '' TERM; for i in 1 2 3; do (while :; do sleep 1; done) & done; wait"], check=True)
""",
}


@pytest.mark.long
def test_no_process_is_left_and_no_node_is_drained(sandbox: Sandbox, shared: Path) -> None:
    """KempnerForge#177 (loaders), submitit#1677 (ignoring)."""
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"low.GraceTime": "60"})
    runs, jobs = {}, {}
    for name, program in PROGRAMS.items():
        (shared / f"{name}.py").write_text(program)
        runs[name] = shared / "runs" / name
        words = [
            "slurm-resilience",
            "submit",
            "--run-dir",
            str(runs[name]),
            "--partition",
            "low",
            "--exclusive",
            "--time",
            "30",
        ]
        words += ["--preload", "torch" if name == "loaders" else "", "--", sys.executable, str(shared / f"{name}.py")]
        done = sandbox.exec([*words, str(shared / f"{name}.up")], cwd=shared)
        assert done.returncode == 0, done.stderr
        jobs[name] = done.stdout.split()[-1]
    for name, job in jobs.items():
        sandbox.wait_for((shared / f"{name}.up").exists, 200, what=f"{name} ({sandbox.job_state(job)})")
    assert all(alive(run) for run in runs.values())
    high = ["sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 60"]
    blocker = sandbox.exec(high, cwd=shared, check=True).stdout.strip()
    sandbox.wait_for(lambda: sandbox.job_state(blocker) == "RUNNING", 200, what="The job that preempts")
    left = {name: alive(run) for name, run in runs.items()}
    assert not any(left.values()), left
    for name, run in runs.items():
        stops = [event for event in read_events(run) if event["event"] == "attempt_stopped"]
        # (a rank that saves or ends at once may do so before Slurm has been asked why)
        causes = [event["cause"] for event in read_events(run) if event["event"] == "warning_explained"]
        assert causes[-1] == "preemption", (name, causes, stops)
        assert stops[-1]["saved"] is (name == "loaders")
        assert any(event["event"] == "requeue_done" for event in read_events(run)), name
    states = sandbox.node_states()
    assert not any("DRAIN" in state for state in states.values()), states


def alive(run_dir: Path) -> list[str]:
    """Living processes that have the run's folder in their environment or on their command line."""
    mark, out = os.fsencode(run_dir), []
    for pid in all_pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if (mark in words or mark in Path(f"/proc/{pid}/environ").read_bytes()) and Process.of(pid).alive():
                out.append(f"{pid} {words[:80]!r}")
        except OSError:
            continue
    return out
