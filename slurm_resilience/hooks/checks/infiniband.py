"""Are the InfiniBand and RoCE ports that jobs need up, at their rate, and do they stay up?

Only the ports that the site names are looked at: a machine has others that nobody has cabled (leptonai/gpud#99).  Flaps are
counted as what link_downed has grown by within a window, never since boot (nebius/soperator#481), and flag; a port that
is down fails, and is blamed on the fabric: at the other end of the cable there is a switch that many nodes share.
Source: Documentation/ABI/stable/sysfs-class-infiniband.
"""

import re
import time

from ..world import boot_id
from . import FABRIC, FAIL, FLAG, OK, Host, Result, unknown

NAME = "infiniband"
CONTEXTS = ("prolog", "periodic", "boot")
TIMEOUT_S = 3.0
SEVERITY = "drain"
CLASS = "/sys/class/infiniband"
MOST_SAMPLES = 200

_STATE = re.compile(r"(\d): ([A-Z_]+)\Z")
_RATE = re.compile(r"([0-9.]+) Gb/sec\b")
_PORT = re.compile(r"([A-Za-z0-9_-]+):(\d+)\Z")
STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")


def check(host: Host) -> Result:
    wanted = host.options.get("ports")
    if not isinstance(wanted, list) or not wanted:
        return Result(OK, "no port is asked for")
    if not host.names(CLASS):
        return Result(FAIL, f"the kernel has no InfiniBand device, {len(wanted)} ports expected", "device")
    downs = {}  # type: dict[str, int]
    for port in [str(port) for port in wanted]:
        result, count = _one(host, port)
        if result is not None:
            return result
        if count is not None:
            downs[port] = count
    return _flaps(host, downs) or Result(OK, f"{len(wanted)} ports")


def _one(host: Host, port: str) -> "tuple[Result | None, int | None]":
    """What is wrong with this port, and its count of losses of the link; None for a counter that the device lacks."""
    named = _PORT.match(port)
    if not named:
        return unknown(f"{port!r} is no port: mlx5_0:1"), None
    base, where = "{}/{}/ports/{}".format(CLASS, *named.groups()), port.replace(":", "p")
    if named.group(1) not in host.names(CLASS):
        return Result(FAIL, f"{named.group(1)} is not there", "device", where), None
    state = _STATE.match(host.read(base + "/state", 64).strip())
    if not state or state.group(2) not in STATES:
        return unknown("{} has the state {!r}".format(port, host.read(base + "/state", 64).strip())), None
    if state.group(2) not in ("ACTIVE", "ACTIVE_DEFER"):
        physical = host.read(base + "/phys_state", 64).strip()
        return Result(FAIL, f"{port} is {state.group(2)} ({physical})", "down", where, blame=FABRIC), None
    least = host.number("rate_gbps", 0)
    rate = _RATE.match(host.read(base + "/rate", 64).strip())
    if least > 0 and not rate:
        return unknown("{} has the rate {!r}".format(port, host.read(base + "/rate", 64).strip())), None
    if least > 0 and rate and float(rate.group(1)) < least:
        return Result(FAIL, f"{port} runs at {rate.group(1)} of {least:g} Gb/s", "rate", where, blame=FABRIC), None
    count = host.read(base + "/counters/link_downed", 64).strip()
    return None, int(count) if count.isdigit() else None


def _flaps(host: Host, downs: "dict[str, int]") -> "Result | None":
    """The losses within the window; remembered are (time since boot, counts), and another boot starts anew."""
    memo, boot, now = host.memo(), boot_id(), time.monotonic()
    window = host.number("window_s", 86400)
    kept = memo.get("samples") if memo.get("boot") == boot else None
    samples = [each for each in kept if _is_sample(each)] if isinstance(kept, list) else []
    # What was true at the beginning of the window was seen before it
    samples = [each for each in samples if now - each[0] > window][-1:] + [each for each in samples if now - each[0] <= window]
    if not samples or samples[-1][1] != downs:
        samples.append([now, downs])
    host.remember({"boot": boot, "samples": samples[-MOST_SAMPLES:]})
    for port, count in sorted(downs.items()):
        grown = count - min([each[1].get(port, count) for each in samples] + [count])
        if grown >= host.number("flaps", 5):
            where = port.replace(":", "p")
            return Result(FAIL, f"{port} lost its link {grown} times within {window:g} s", "flaps", where, FABRIC, FLAG)
    return None


def _is_sample(each: object) -> bool:
    return (
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], (int, float)) and isinstance(each[1], dict)
        and all(isinstance(count, int) for count in each[1].values())
    )  # fmt: skip
