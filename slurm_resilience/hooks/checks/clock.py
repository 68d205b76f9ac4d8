"""Is this node's clock right?  Asks chrony; and sees by itself when the clock jumped since the last look.

munge refuses what is more than 300 s off, so that a node with a wrong clock fails every job.
"""

import re
import time

from .. import files
from ..world import boot_id
from . import FAIL, FLAG, OK, WARN, Host, Result, unknown

NAME = "clock"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 4.0
SEVERITY = "drain"

# chronyc -c tracking: reference id, address, stratum, reference time, system time offset, … , leap status
_ROW = re.compile(
    r"[0-9A-F]{8},[^,]*,\d+,[0-9.]+,(-?[0-9.]+),(?:[^,]*,){8}(Normal|Insert second|Delete second|Not synchronised)\Z"
)


def check(host: Host) -> Result:
    memo = host.memo()
    boot, wall, steady = boot_id(), time.time(), time.monotonic()
    host.remember({"boot": boot, "wall": wall, "steady": steady})
    jump = 0.0
    if memo.get("boot") == boot:
        jump = (wall - files.number(memo.get("wall"), wall)) - (steady - files.number(memo.get("steady"), steady))
    if abs(jump) > host.number("jump_s", 5):
        return Result(WARN, f"the clock jumped by {jump:.0f} s since the last look", "jump", severity=FLAG)
    if not host.options.get("chronyc"):
        return Result(OK, "no jump")
    done = host.tool("chronyc", "/usr/bin/chronyc", "-c", "tracking")
    if done.problem or done.code != 0:
        return unknown("chronyc: {}".format(done.problem or " ".join((done.out + done.err).split())[:200]))
    return judge(done.out, host.number("fail_s", 120), host.number("warn_s", 1))


def judge(text: str, fail_s: float, warn_s: float) -> Result:
    """What chrony says."""
    found = _ROW.match(text.strip())
    if not found:
        return unknown("chronyc answers in a form that we do not know: {}".format(" ".join(text.split())[:200]))
    off = abs(float(found.group(1)))
    if found.group(2) == "Not synchronised":
        return Result(WARN, "the clock is not synchronised", "unsynced", severity=FLAG)
    if off > fail_s:
        return Result(FAIL, f"the clock is {off:.1f} s off", "off")
    if off > warn_s:
        return Result(WARN, f"the clock is {off:.1f} s off", "off", severity=FLAG)
    return Result(OK, f"{off:.6f} s off")
