"""Is a process of the ended job still alive?  By the job's cgroup, never by user: other jobs of the same user live on.

With ``fix`` they are killed.  What is left is the job's fault, and never drains; only what cannot be killed does.
"""

import os
import time

from . import FAIL, FLAG, JOB, OK, WARN, Host, Result
from . import processes as table

NAME = "leftovers"
CONTEXTS = ("epilog",)
TIMEOUT_S = 4.0
SEVERITY = "drain"
LEAST_UID = 1000
GOES_WITHIN_S = 1.5
STUCK_AFTER_S = 1.0


def check(host: Host) -> Result:
    job, uid = getattr(host.job, "id", ""), getattr(host.job, "uid", -1)
    if not job or uid < host.number("least_uid", LEAST_UID):
        return Result(OK, "no job of an ordinary user has ended")
    found = [process for process in table.of_uid(host, uid) if table.job_of(host, process.pid) == job]
    if not found:
        return Result(OK, "nothing is left")
    text = "{} processes of job {} outlived it: {}".format(len(found), job, ",".join(str(p.pid) for p in found[:8]))
    if not host.options.get("fix", False):
        return Result(WARN, text, "left", blame=JOB, severity=FLAG)
    stuck, left = _end(host, job, uid, found)
    if stuck:
        names = ",".join(f"{process.pid} ({process.state})" for process in stuck[:8])
        return Result(FAIL, f"processes of job {job} cannot be killed: {names}", "stuck")
    if left:
        text = f"{left} processes of job {job} are left: it forks on, or they take long to end"
        return Result(WARN, text, "forks", blame=JOB, severity=FLAG)
    return Result(WARN, text + "; killed", "left", blame=JOB, severity=FLAG)


def _end(host: Host, job: str, uid: int, found: "list[table.Process]") -> "tuple[list[table.Process], int]":
    """Kill them and whatever they have forked meanwhile; those that do not die of it, and how many others are left.

    Stuck is what sleeps uninterruptibly a second after it was killed.  What has not had a CPU yet to die on, or gives back
    a terabyte, is not: a fork bomb must not look like broken hardware.
    """
    deadline = min(time.monotonic() + GOES_WITHIN_S, host.deadline - 0.3)
    killed = {}  # type: dict[tuple[int, str], float]
    while found:
        for process in found:
            _kill(host, process)
            killed.setdefault((process.pid, process.start), time.monotonic())
        time.sleep(0.02)
        found = [process for process in table.of_uid(host, uid) if table.job_of(host, process.pid) == job]
        if time.monotonic() > deadline:
            break
    before = time.monotonic() - STUCK_AFTER_S
    stuck = [
        process
        for process in found
        if process.state == "D" and not process.ending and killed.get((process.pid, process.start), before + 1.0) <= before
    ]
    return stuck, len(found) - len(stuck)


def _same(host: Host, process: "table.Process") -> bool:
    now = table.read(host, process.pid)
    return now is not None and now.start == process.start


def _kill(host: Host, process: "table.Process") -> None:
    """By a handle where the system has them (3.9), so that a number that was given out anew is not meant."""
    try:
        if hasattr(os, "pidfd_open"):
            import signal

            fd = os.pidfd_open(process.pid)
            try:
                if _same(host, process):
                    signal.pidfd_send_signal(fd, 9)
            finally:
                os.close(fd)
        elif _same(host, process):
            os.kill(process.pid, 9)
    except OSError:
        pass  # it is gone, or it cannot be killed: the next look tells
