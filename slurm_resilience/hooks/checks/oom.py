"""Has the kernel killed something for want of memory since we last looked?

In a job's cgroup it is the job's own doing.  Without a cgroup it is the node's: flagged, and worse when it hit a service.
"""

import re

from ..world import boot_id
from . import FLAG, JOB, NODE, OK, WARN, Host, Result, unknown
from .kernel_log import Unreadable, since

NAME = "oom"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 3.0
SEVERITY = "flag"

_CGROUP = re.compile(r"Memory cgroup out of memory: Kill(?:ed)? process (\d+) \(([^)]{0,32})\)")
_SYSTEM = re.compile(r"(?<!cgroup )[Oo]ut of memory: Kill(?:ed)? process (\d+) \(([^)]{0,32})\)")
SERVICES = ("slurmd", "slurmstepd", "munged", "sshd", "sssd", "systemd")


def check(host: Host) -> Result:
    cursor = host.memo()
    try:
        lines, cursor = since(host, boot_id(), cursor)
    except Unreadable as error:
        return unknown(str(error))
    host.remember(cursor)
    return judge(lines)


def judge(lines: "list[str]") -> Result:
    """What these lines say."""
    jobs, system = [], []
    for line in lines:
        inside, outside = _CGROUP.search(line), _SYSTEM.search(line)
        if inside:
            jobs.append(inside.group(2))
        elif outside:
            system.append(outside.group(2))
    for name in system:
        if name.split(":")[0] in SERVICES:
            return Result(WARN, f"the kernel killed {name} for want of memory", "service", blame=NODE, severity=FLAG)
    if system:
        return Result(WARN, "the node ran out of memory; killed: {}".format(", ".join(system[:5])), "node", severity=FLAG)
    if jobs:
        return Result(
            WARN, "a job ran out of its memory; killed: {}".format(", ".join(jobs[:5])), "job", blame=JOB, severity=FLAG
        )
    return Result(OK, "no OOM kill")
