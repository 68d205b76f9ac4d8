"""Has the memory controller counted an uncorrected error, or many corrected ones?  Source: kernel, EDAC sysfs."""

from . import DRAIN_NOW, FAIL, FLAG, OK, WARN, Host, Result, unknown

NAME = "memory_errors"
CONTEXTS = ("epilog", "periodic", "boot")
TIMEOUT_S = 2.0
SEVERITY = "drain_now"
EDAC = "/sys/devices/system/edac/mc"


def check(host: Host) -> Result:
    controllers = [name for name in host.names(EDAC) if name.startswith("mc") and name[2:].isdigit()]
    if not controllers:
        return Result(OK, "no memory controller reports errors here")
    corrected = 0
    for name in controllers:
        told = [host.read(f"{EDAC}/{name}/{kind}", 64).strip() for kind in ("ue_count", "ce_count")]
        if not all(text.isdigit() for text in told):
            return unknown(f"{name} counts {told!r}")
        if int(told[0]) > host.number("uncorrected", 0):
            return Result(FAIL, f"{name} counts {told[0]} uncorrected errors", "ue", name, severity=DRAIN_NOW)
        corrected += int(told[1])
    if corrected > host.number("corrected", 1000):
        return Result(WARN, f"{corrected} corrected memory errors since boot", "ce", severity=FLAG)
    return Result(OK, f"{len(controllers)} controllers")
