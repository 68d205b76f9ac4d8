"""Starts a requeued job at once instead of after two minutes: repeats its begin time as soon as slurmctld has set it.

Runs as EpilogSlurmctld.  slurmctld keeps the job COMPLETING until that program ends, so it must end first: the work is
done by a child in a session of its own.  StartTime=now is lost while the job completes, and kept 1.2 s after it pends.
"""

import os
import time

from . import ledger, nodes, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

WAIT_S = 1.2
PENDS_WITHIN_S = 45.0
TRIES = 5
SLURMS_OWN_S = 300.0  # it takes 121 s


def run(world: "World") -> None:
    """Back at once; what is to be done goes on behind."""
    if not world.job.id or world.text("expedite", "jobs", "resilient") == "off":
        return
    gone, staying = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(gone)
            os.close(staying)
            world.deadline = time.monotonic() + PENDS_WITHIN_S + 30.0
            try:
                ledger.record(world, "expedited", result=expedite(world))
            finally:
                os._exit(0)
        os._exit(0)
    os.close(staying)
    os.read(gone, 1)  # end of file: the grandchild has its own session, slurmctld's clean-up does not reach it
    os.close(gone)
    os.waitpid(pid, 0)


def expedite(world: "World") -> str:
    """What became of the job, in a word or two.  Held jobs stay held; a begin time far away is somebody's wish."""
    deadline = time.monotonic() + PENDS_WITHIN_S
    pending_since = 0.0
    tries = 0
    while time.monotonic() < deadline and tries < TRIES:
        try:
            job = look(world)
        except (slurm.NoAnswer, slurm.Refused) as error:
            return f"unknown: {error}"
        if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
            if not _wanted(world, job):
                return "not asked for"
            pending_since = pending_since or time.monotonic()
            if time.monotonic() - pending_since >= WAIT_S:
                tries += 1
                slurm.call(world, "scontrol", "update", "JobId=" + world.job.id, "StartTime=now")
        elif pending_since and tries:
            return "{} after {} tries".format(job["JobState"].lower(), tries)
        elif job["JobState"] not in ("COMPLETING", "PENDING", "RUNNING"):
            return "not requeued: {}".format(job["JobState"].lower())
        elif job["JobState"] == "PENDING" and job["Reason"] not in ("None", "Resources", "Priority"):
            return "pending for {}".format(job["Reason"])
        time.sleep(0.3)
    return f"gave up after {tries} tries"


def _wanted(world: "World", job: "dict[str, str]") -> bool:
    if int(job["Restarts"] or 0) < 1:
        return False  # never ran: its begin time is the user's
    if nodes.seconds(job["Eligible"]) - time.time() > SLURMS_OWN_S:
        return False  # Slurm itself never lets a requeued job wait so long: somebody wants it to begin then
    if world.text("expedite", "jobs", "resilient") == "all":
        return True
    return any(word.startswith("resilient") for word in job["Comment"].split())


def look(world: "World") -> "dict[str, str]":
    """The fields of the job that we need, asked for one by one, so that no free text can pose as another."""
    fields = "State:30,Reason:60,RestartCnt:12,EligibleTime:24,Comment:120"
    out = slurm.call(world, "squeue", "-h", "-t", "all", "-j", world.job.id, "-O", fields)
    lines = [line for line in out.splitlines() if line.strip()]
    if not lines:
        return {"JobState": "GONE", "Reason": "", "Restarts": "0", "Eligible": "", "Comment": ""}
    line = lines[0].ljust(246)
    cells = [line[0:30], line[30:90], line[90:102], line[102:126], line[126:246]]
    state, why, restarts, eligible, comment = [cell.strip() for cell in cells]
    number = restarts if restarts.isdigit() else "0"
    return {"JobState": state, "Reason": why, "Restarts": number, "Eligible": eligible, "Comment": comment}
