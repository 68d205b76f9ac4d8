"""Faults that are jobs of others: preemption."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import ConfigError, SandboxError, SandboxMisuse
from slurm_resilience.sandbox.records import fields

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox

_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "")


def preempt(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """A job in `high` takes nodes; back when a job of `low` has been told to go, with the ids of both.

    Raises :class:`SandboxError`, and takes its job back, when nothing was preempted.
    """
    count = options["nodes"] if options["nodes"] is not None else len(sandbox.nodes)
    if not 1 <= count <= len(sandbox.nodes):
        raise ConfigError(f"--nodes {count}: the sandbox has {len(sandbox.nodes)} nodes")
    before = {job["JobId"]: job for job in _jobs(sandbox) if job.get("Partition") == "low" and job.get("JobState") == "RUNNING"}
    if not before:
        raise SandboxMisuse("There is nothing to preempt", evidence="no job runs in the partition low")
    script = f"exec sleep {options['seconds']:g}"
    argv = ["sbatch", "--parsable", "--partition=high", f"--nodes={count}", "--exclusive", "--job-name=sandbox-preempt"]
    argv += ["--output=/dev/null", "--no-requeue", f"--wrap={script}"]
    result = sandbox.exec(argv, cwd="/", timeout=60)
    if result.returncode != 0:
        raise SandboxError("The preempting job cannot be submitted", evidence=result.stderr.strip())
    ours = result.stdout.strip().partition(";")[0]
    submitted_at = time.time()
    try:
        victims = _wait_for_victims(sandbox, ours, before, options["within"])
    except BaseException:
        sandbox.slurm(["scancel", ours], check=False)
        raise
    preempted_at = time.time()
    if options["wait"]:
        within = options["within"] + options["seconds"] + 60
        sandbox.wait_for(lambda: sandbox.job_state(ours) in _ENDED, within, what=f"The end of the preempting job {ours}")
    return {"job": int(ours), "victims": victims, "submitted_at": submitted_at, "preempted_at": preempted_at}


def _wait_for_victims(sandbox: Sandbox, ours: str, before: dict[str, dict[str, str]], within_s: float) -> list[int]:
    deadline = time.monotonic() + within_s
    while True:
        jobs = {job["JobId"]: job for job in _jobs(sandbox)}
        victims = [int(job_id) for job_id, old in before.items() if _preempted(old, jobs.get(job_id))]
        if victims:
            return victims
        state = jobs.get(ours, {}).get("JobState", "")
        if state != "PENDING":
            raise SandboxError("Nothing was preempted", evidence=f"job {ours} is {state or 'gone'}, no job of low had to go",
                               remedy="there were free nodes: take more of them with --nodes")  # fmt: skip
        if time.monotonic() > deadline:
            raise SandboxError("Nothing was preempted", evidence=f"after {within_s:g} s job {ours} is still pending, Reason="
                               f"{jobs[ours].get('Reason')}", remedy="are nodes down? see `sandbox status`")  # fmt: skip
        time.sleep(0.1)


def _preempted(old: dict[str, str], new: dict[str, str] | None) -> bool:
    """Told to go (PreemptTime was set; it stays so when the job ends by itself), requeued, suspended or ended for it."""
    if new is None:
        return False
    told = new.get("PreemptTime") != old.get("PreemptTime") and new.get("PreemptTime") not in ("None", "Unknown", "N/A", None)
    return told or new.get("JobState") in ("PREEMPTED", "SUSPENDED") or new.get("Restarts") != old.get("Restarts")


def _jobs(sandbox: Sandbox) -> list[dict[str, str]]:
    lines = sandbox.slurm(["scontrol", "-o", "show", "jobs"]).stdout.splitlines()
    return [job for job in map(fields, lines) if "JobId" in job]


def cancel_all(sandbox: Sandbox) -> None:
    """No job is pending or running.  Jobs that complete still hold their nodes for a moment.

    KILL goes first: a job that saves on TERM, or traps it and asks for a requeue, would hold up whoever heals.
    """
    deadline = time.monotonic() + 60
    while active := [job["JobId"] for job in _jobs(sandbox) if job.get("JobState") not in (*_ENDED, "COMPLETING")]:
        if time.monotonic() > deadline:
            raise SandboxError(f"Jobs {', '.join(active)} cannot be cancelled")
        sandbox.slurm(["scancel", "--quiet", "--full", "--signal=KILL", *active], check=False)
        sandbox.slurm(["scancel", "--quiet", *active], check=False)
        time.sleep(0.1)
