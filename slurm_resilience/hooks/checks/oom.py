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

# At the start only: names of processes and files, which users choose, are in other lines of the kernel's own
_CGROUP = re.compile(r"Memory cgroup out of memory: Kill(?:ed)? process (\d+) \(([^)]{0,32})\)")
_SYSTEM = re.compile(r"Out of memory: Kill(?:ed)? process (\d+) \(([^)]{0,32})\)(?:.* UID:(\d+))?")
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
    jobs, system, services = [], [], []
    for line in lines:
        inside, outside = _CGROUP.match(line), _SYSTEM.match(line)
        if inside:
            jobs.append(inside.group(2))
        elif outside:
            system.append(outside.group(2))
            services += [outside.group(2)] if outside.group(3) in (None, "0") else []
    for name in services:
        if name.split(":")[0] in SERVICES:
            return Result(WARN, f"the kernel killed {name} for want of memory", "service", blame=NODE, severity=FLAG)
    if system:
        return Result(WARN, "the node ran out of memory; killed: {}".format(", ".join(system[:5])), "node", severity=FLAG)
    if jobs:
        return Result(
            WARN, "a job ran out of its memory; killed: {}".format(", ".join(jobs[:5])), "job", blame=JOB, severity=FLAG
        )
    return Result(OK, "no OOM kill")
