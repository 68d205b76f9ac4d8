"""Actors outside of the job, on a real Slurm and as its ordinary user: `watch` and `requeue`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_resilience.sandbox import Sandbox
from slurm_resilience.slurm.mark import Marks

# A job that says when it starts, and ends when it is told to end.
SCRIPT = """#!/bin/bash
trap 'exit 0' TERM
echo "$(hostname) $SLURM_JOB_NODELIST" > {folder}/started.${{SLURM_JOB_ID}}.${{SLURM_RESTART_COUNT:-0}}
sleep 600 & wait
"""


def submit(sandbox: Sandbox, shared: Path, *options: str, comment: str = "mine resilient") -> str:
    script = shared / "job.sh"
    script.write_text(SCRIPT.format(folder=shared))
    argv = ["sbatch", "--parsable", "--requeue", f"--comment={comment}", "--output=/dev/null", *options, str(script)]
    return sandbox.exec(argv, cwd=shared, check=True).stdout.strip()


def started(sandbox: Sandbox, shared: Path, job: str, restart: int, *, within: float = 100) -> str:
    path = shared / f"started.{job}.{restart}"
    what = f"run {restart} of job {job} (now {sandbox.job(job)})"
    sandbox.wait_for(lambda: path.exists() and path.read_text().endswith("\n"), within, what=what)
    return path.read_text().split()[1]


@contextmanager
def watching(sandbox: Sandbox, shared: Path) -> Iterator[list[dict[str, Any]]]:
    """`slurm-resilience watch --json` beside the lines of a test; what it said is there afterwards."""
    said: list[dict[str, Any]] = []
    pid = shared / "watch.pid"
    argv = sandbox.exec_command(["bash", "-c", f"echo $$ > {pid}; exec slurm-resilience watch --json"], new_session=True)
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield said
        finally:
            sandbox.exec(["kill", "-TERM", pid.read_text().strip()], check=True)  # its number on the login host
            out, _ = process.communicate(timeout=60)
            said += map(json.loads, out.splitlines())


def once(sandbox: Sandbox, *options: str) -> list[dict[str, Any]]:
    done = sandbox.exec(["slurm-resilience", "watch", "--once", "--json", *options])
    assert done.returncode == 0, done.stderr
    jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return jobs


def test_with_a_watch_a_plain_requeue_does_not_take_two_minutes(sandbox: Sandbox, shared: Path) -> None:
    """Also what a job gets whose supervisor died with its node: Slurm's own requeue, and nobody inside to shorten it."""
    ours, others = submit(sandbox, shared), submit(sandbox, shared, comment="mine")
    for job in (ours, others):
        started(sandbox, shared, job, 0)
    with watching(sandbox, shared) as said:
        sandbox.exec(["scontrol", "requeue", ours], check=True)
        sandbox.exec(["scontrol", "requeue", others], check=True)
        started(sandbox, shared, ours, 1)
        assert sandbox.job(others)["Reason"] == "BeginTime", "nobody asked for that one"
    assert [(line["job"], line["what"]) for line in said] in ([(ours, "expedited")], [])  # it may be told after we ended it


def test_a_job_that_slurm_holds_after_a_failed_prolog_is_let_go(sandbox: Sandbox, shared: Path) -> None:
    """ArjunaUsers#63."""
    sandbox.fault("fail-prolog", "n1")
    job = submit(sandbox, shared, "--nodes=1-4", "--exclusive")
    sandbox.wait_for(lambda: "launch_failed" in sandbox.job(job).get("Reason", ""), 150, what="The hold after the prolog")
    assert [(line["what"], line["trouble"]) for line in once(sandbox, "--dry-run")] == [("found", "launch_failed")]
    assert [line["what"] for line in once(sandbox)] == ["released"]
    with watching(sandbox, shared):
        assert started(sandbox, shared, job, 1) == "n[2-4]", "the node whose prolog failed is drained"
    assert Marks.read(sandbox.job(job)["Comment"]).freed == 1


def test_a_job_is_given_other_nodes_by_hand(sandbox: Sandbox, shared: Path) -> None:
    job = submit(sandbox, shared, "--nodes=2-4", "--exclusive")
    assert started(sandbox, shared, job, 0) == "n[1-4]"
    dry = sandbox.exec(["slurm-resilience", "requeue", job, "--nodes", "2-3", "--dry-run"])
    assert "would be requeued nodes 2-3" in dry.stdout, dry.stderr
    done = sandbox.exec(["slurm-resilience", "requeue", job, "--nodes", "2-3", "--exclude", "n2,nope", "--json"])
    assert done.returncode == 0, done.stderr + done.stdout
    said = json.loads(done.stdout)
    assert (said["running"], said["excluded"], said["not_excluded"]) == (True, ["n2"], ["nope"])
    assert started(sandbox, shared, job, 1) == "n[1,3-4]"
    marks = Marks.read(sandbox.job(job)["Comment"])
    assert (marks.words, marks.excluded, marks.held_at) == ("mine resilient", ("n2",), None)
    sandbox.exec(["scancel", job], check=True)
    sandbox.wait_for(lambda: sandbox.job_state(job) == "CANCELLED", 90, what="The end")
    again = sandbox.exec(["slurm-resilience", "requeue", job])
    assert again.returncode == 78
    assert "was cancelled" in again.stderr
