"""Has the kernel said since we last looked that a CPU or a task is stuck?

A CPU that answers no interrupt (hard lockup) fails the node.  Soft lockups and hung tasks flag it: they come and go under
heavy I/O (openzfs/zfs#4536, ironfish#701).  Only at the start of a line of the kernel's own: names of processes and files
are in other lines, and users choose them.
"""

import re

from ..world import boot_id
from . import FAIL, FLAG, OK, WARN, Host, Result, unknown
from .kernel_log import Unreadable, since

NAME = "lockups"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 3.0
SEVERITY = "drain"

_HARD = re.compile(r"(?:NMI watchdog: |watchdog: )?Watchdog detected hard LOCKUP on cpu (\d+)")
_SOFT = re.compile(r"(?:NMI watchdog: |watchdog: )?BUG: soft lockup - CPU#(\d+) stuck for (\d+)s!")
_HUNG = re.compile(r"INFO: task .{1,40}:(\d+) blocked for more than (\d+) seconds")
_STALL = re.compile(r"(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls?")


def check(host: Host) -> Result:
    try:
        lines, cursor = since(host, boot_id(), host.memo())
    except Unreadable as error:
        return unknown(str(error))
    host.remember(cursor)
    return judge(lines)


def judge(lines: "list[str]") -> Result:
    """What these lines say, the worst first."""
    soft, hung, stalls = [], [], 0
    for line in lines:
        hard = _HARD.match(line)
        if hard:
            return Result(FAIL, f"CPU {hard.group(1)} is stuck and answers no interrupt", "hard", "c" + hard.group(1))
        found = _SOFT.match(line)
        if found:
            soft.append(found.groups())
        found = _HUNG.match(line)
        if found:
            hung.append(found.groups())
        stalls += 1 if _STALL.match(line) else 0
    if soft:
        cpu, seconds = soft[-1]
        return Result(WARN, f"{len(soft)} soft lockups; CPU {cpu} was stuck for {seconds} s", "soft", severity=FLAG)
    if hung:
        pid, seconds = hung[-1]
        return Result(WARN, f"{len(hung)} hung tasks; process {pid} for more than {seconds} s", "hung", severity=FLAG)
    if stalls:
        return Result(WARN, f"{stalls} RCU stalls", "rcu", severity=FLAG)
    return Result(OK, "nothing is stuck")
