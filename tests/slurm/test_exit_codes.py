"""The table of exit codes is what `sacct` shows: every row, from a job that ended for that reason."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox

RANK = Path(__file__).with_name("cheap_rank.py")
SUBMIT = """
import json, sys
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.prepare import Work
folder, rank, no_torch, wishes = sys.argv[1:]
out = {}
for name, (config, how) in json.loads(wishes).items():
    executor = ResilientExecutor(folder, config=ResilienceConfig.build({"preload": [], **config}))
    where = {"NODE_LOST": "n[3-4]", "PREEMPTED": "n2"}.get(name, "n1")  # what is done to one must not reach another
    executor.update_parameters(partition="low", time=30, name=name, setup=[f"export PYTHONPATH={no_torch}"], signal_delay_s=30,
                               nodelist=where)
    job = executor.submit_work(Work(command=(sys.executable, rank, *how)))
    out[name] = [job.job_id, str(job.run_dir)]
print(json.dumps(out))
"""
OFF = {"requeue": False}
# What a run is told to be, and how its rank fails by itself.
WISHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "OK": ({}, []),
    "INTERNAL": ({}, []),
    "REQUEUED": ({}, []),
    "APP_ERROR": ({}, ["raise"]),
    "RANK_CRASH": ({"budgets": {"rank_crash": 0}}, ["kill"]),
    "HANG": ({"budgets": {"hang": 0}, "limits": {"learn": False, "step_s": 3.0, "init_s": 10.0}}, ["hang"]),
    "NODE_LOST": ({**OFF, "nodes": [2, 2], "budgets": {"node_lost": 0}}, []),
    "BAD_CHECKPOINT": ({}, [str(int(ExitCode.BAD_CHECKPOINT))]),
    "OOM": ({"budgets": {"oom": 0}}, [str(int(ExitCode.OOM))]),
    "CANCELLED": ({}, []),
    "TIME_LIMIT": (OFF, []),
    "PREEMPTED": (OFF, []),
}


@pytest.mark.long
def test_every_row(sandbox: Sandbox, shared: Path) -> None:
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"low.GraceTime": "60"})
    no_torch = shared / "no-torch"
    no_torch.mkdir()
    (no_torch / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    (shared / "submit.py").write_text(SUBMIT)
    argv = [sys.executable, "-W", "ignore", str(shared / "submit.py"), str(shared / "runs"), str(RANK), str(no_torch)]
    done = sandbox.exec([*argv, json.dumps(WISHES)], cwd=shared)
    assert done.returncode == 0, done.stderr
    jobs = {name: (job, Path(folder)) for name, (job, folder) in json.loads(done.stdout).items()}

    def until(name: str, kind: str) -> None:
        job, folder = jobs[name]
        sandbox.wait_for(
            lambda: any(event["event"] == kind for event in read_events(folder)),
            240,
            what=f"{kind} of {name} {sandbox.job(job)}",
        )

    jobs |= _that_never_begin(sandbox, shared)
    for name in ("OK", "INTERNAL", "REQUEUED", "NODE_LOST", "CANCELLED", "TIME_LIMIT", "PREEMPTED"):
        until(name, "checkpoint_committed")
    (jobs["OK"][1] / "enough").touch()
    sandbox.exec(["scancel", jobs["CANCELLED"][0]], check=True)
    sandbox.exec(["scontrol", "requeue", jobs["REQUEUED"][0]], check=True)
    sandbox.slurm(["scontrol", "update", f"JobId={jobs['TIME_LIMIT'][0]}", "TimeLimit=2"])
    until("REQUEUED", "requeue_done")
    for name in ("APP_ERROR", "RANK_CRASH", "HANG", "BAD_CHECKPOINT", "OOM", "TIME_LIMIT"):
        until(name, "run_failed")
    sandbox.fault("power-off", "n4")
    until("NODE_LOST", "run_failed")
    high = ["sbatch", "--partition=high", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    sandbox.exec(high, cwd=shared, check=True)
    until("PREEMPTED", "run_failed")
    # nobody can be asked why: a fault that no other code fits
    sandbox.fault("break-scontrol", how="fail")
    sandbox.slurm(["scancel", "--full", "--signal=TERM", jobs["INTERNAL"][0]])
    until("INTERNAL", "run_failed")
    sandbox.fault("break-scontrol", off=True)

    seen = {}
    for name, (job, _) in jobs.items():
        seen[name] = sandbox.wait_for(partial(_accounted, sandbox, job), 150, what=f"the accounting of {name}")
    expected = {code.name: _SLURMS_OWN.get(code.name, ("FAILED", int(code))) for code in ExitCode}
    assert seen == expected


# Where Slurm itself ended the run, and not the script, it keeps its own word and no code.  (A job that ends by itself in the
# grace period of a preemption has failed, to Slurm 22.05.)
_SLURMS_OWN = {"REQUEUED": ("REQUEUED", 0), "CANCELLED": ("CANCELLED", 0), "OK": ("COMPLETED", 0)}


def _that_never_begin(sandbox: Sandbox, shared: Path) -> dict[str, tuple[str, Path]]:
    """Refused before there is a run, and a job in which no agent can be started."""
    words = {
        "USAGE": "--bogus",
        "CONFIG_ERROR": "--nodes 3-2",
        "LAUNCH_FAILED": "--set limits.handshake_s=5 --set requeue=false",
    }
    out = {}
    for name, options in words.items():
        run = f"slurm-resilience run --run-dir {shared}/{name} {options} -- {sys.executable} {RANK}"
        broken = f"mkdir -p {shared}/bin; printf '#!/bin/sh\\nexit 1\\n' > {shared}/bin/srun; chmod +x {shared}/bin/srun; "
        wrap = (broken + f"PATH={shared}/bin:$PATH " if name == "LAUNCH_FAILED" else "") + run
        argv = ["sbatch", "--parsable", "--partition=low", "--nodelist=n1", f"--output={shared}/{name}.out", f"--wrap={wrap}"]
        out[name] = (sandbox.exec(argv, cwd=shared, check=True).stdout.strip(), shared / name)
    return out


def _accounted(sandbox: Sandbox, job: str) -> tuple[str, int] | None:
    """State and exit code of the job's first run, once it has ended.

    Taking a lost node out of a job closes a record (RESIZING) and opens another one for the same run.
    """
    lines = sandbox.exec(["sacct", "-n", "-P", "-X", "-D", "-j", job, "-o", "State,ExitCode"], check=True).stdout.splitlines()
    lines = [line for line in lines if not line.startswith("RESIZING")]
    if not lines:
        return None
    state, code = lines[0].split("|")
    if state in ("RUNNING", "PENDING", "COMPLETING"):
        return None
    return state.split()[0], int(code.partition(":")[0])
