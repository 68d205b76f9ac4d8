"""Does a process hold a GPU that belongs to no job, to the job that has just ended, or that is not there any more?

By number and cgroup, never by name.  Services of the system (below ``least_uid``) are none.  A flag: who holds it did not
come through Slurm, or was not killed, and the node may be sound.  Source: nvidia-smi --help-query-compute-apps; a
process that is gone while the GPU's memory is not: VisEdit#5, apache/mxnet#4242.
"""

import os
import time

from . import FAIL, JOB, OK, Host, Result, unknown
from . import processes as table

NAME = "gpu_strangers"
CONTEXTS = ("epilog", "periodic")
TIMEOUT_S = 5.0
SEVERITY = "flag"
LEAST_UID = 1000
LOOK_AGAIN_S = 0.3


def check(host: Host) -> Result:
    if int(host.number("count", 0)) == 0:
        return Result(OK, "no GPU is expected here")
    pids = _holders(host)
    if isinstance(pids, Result):
        return pids
    ended = getattr(host.job, "id", "")
    gone = []
    for pid in pids:
        process = table.read(host, pid)
        if process is None or process.state in "ZX":
            gone.append(pid)
            continue
        if process.uid < host.number("least_uid", LEAST_UID):
            continue
        job = table.job_of(host, pid)
        if not job:
            return Result(FAIL, f"process {pid} of uid {process.uid} holds a GPU and belongs to no job", "stranger", f"p{pid}")
        if job == ended:
            return Result(FAIL, f"process {pid} of job {job} holds a GPU still", "left", f"p{pid}", blame=JOB)
    return _ghosts(host, gone) or Result(OK, f"{len(pids)} processes, all of jobs or of the system")


def _holders(host: Host) -> "list[int] | Result":
    done = host.tool("nvidia_smi", "/usr/bin/nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
    if done.problem or done.code != 0:
        return unknown("nvidia-smi: {}".format(done.problem or " ".join((done.out + done.err).split())[:200]))
    words = done.out.split()
    if any(not word.isdigit() for word in words):
        return unknown("nvidia-smi answers in a form that we do not know: {}".format(" ".join(words)[:200]))
    return sorted({int(word) for word in words})


def _ghosts(host: Host, gone: "list[int]") -> "Result | None":
    """Still held, by a process that is still not there: else it has just ended."""
    if not gone:
        return None
    if not os.path.isdir(host.path("/proc/self")) and not host.root:
        return unknown("/proc cannot be read")
    time.sleep(LOOK_AGAIN_S)
    again = _holders(host)
    if isinstance(again, Result):
        return again
    for pid in gone:
        process = table.read(host, pid)
        if process is None and os.path.isdir(host.path(f"/proc/{pid}")):
            return unknown(f"process {pid} holds a GPU and cannot be looked at")
        if pid in again and (process is None or process.state in "ZX"):
            return Result(FAIL, f"process {pid} is gone and a GPU is still held for it", "ghost", f"p{pid}")
    return None
