"""Does the node have the memory that slurm.conf promises?"""

from . import FAIL, OK, Host, Result, unknown

NAME = "memory"
CONTEXTS = ("prolog", "epilog", "periodic", "boot")
TIMEOUT_S = 2.0
SEVERITY = "drain"


def check(host: Host) -> Result:
    promised = host.number("real_memory_mb", 0)
    if promised <= 0:
        return Result(OK, "no memory is promised")
    for line in host.read("/proc/meminfo", 65536).splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "MemTotal:" and words[1].isdigit() and words[2] == "kB":
            there = int(words[1]) // 1024
            if there < promised * (1.0 - host.number("tolerance_percent", 0) / 100.0):
                return Result(FAIL, f"{there} MB of {promised:.0f} MB are there", "size")
            return Result(OK, f"{there} MB")
    return unknown("/proc/meminfo has no MemTotal that we can read")
