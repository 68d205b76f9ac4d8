"""Are as many CPUs online as slurm.conf promises?

Read from the kernel's list of online CPUs, one short line: /proc/cpuinfo has thousands on big nodes.
"""

from . import FAIL, OK, Host, Result, unknown

NAME = "cpu"
CONTEXTS = ("prolog", "epilog", "periodic", "boot")
TIMEOUT_S = 2.0
SEVERITY = "drain"


def check(host: Host) -> Result:
    promised = int(host.number("count", 0))
    if promised <= 0:
        return Result(OK, "no CPU count is promised")
    text = host.read("/sys/devices/system/cpu/online", 4096).strip()
    there = count(text) if text else host.read("/proc/cpuinfo", 64 << 20).count("\nprocessor\t:") + 1
    if there is None or there < 1 or (not text and not host.read("/proc/cpuinfo", 64).startswith("processor\t:")):
        return unknown(f"the kernel's list of CPUs reads {text[:100]!r}")
    if there < promised:
        return Result(FAIL, f"{there} of {promised} CPUs are online", "count")
    return Result(OK, f"{there} CPUs")


def count(text: str) -> "int | None":
    """How many CPUs ``0-3,8,10-11`` are; None for what is no such list."""
    total = 0
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
            return None
        total += int(high or low) - int(low) + 1
    return total
