"""Are all GPUs there, and does none of them ask for a reset or a reboot?

The driver's own recovery action (R570 and newer) decides where it is told; a table of XIDs is only the second best.
Idle GPUs are healthy ones.  Source: NVIDIA GPU memory error management, "Error recovery and response flags".
"""

from .. import child
from . import DRAIN_NOW, FAIL, OK, Host, Result, unknown

NAME = "gpu"
CONTEXTS = ("prolog", "epilog", "periodic", "boot")
TIMEOUT_S = 5.0
SEVERITY = "drain"

_ACTIONS = {"none": "", "reset": "reset", "gpu reset": "reset", "reboot": "reboot", "node reboot": "reboot",
            "drain p2p": "drain-p2p", "drain and reset": "reset"}  # fmt: skip
_NOT_TOLD = ("[n/a]", "n/a", "[not supported]", "")
_LOST = ("GPU is lost", "has fallen off the bus", "Unable to determine the device handle")


def check(host: Host) -> Result:
    expected = int(host.number("count", 0))
    if expected == 0:
        return Result(OK, "no GPU is expected here")
    done = _query(host, "index,uuid,gpu_recovery_action")
    if "is not a valid field" in done.out + done.err:
        done = _query(host, "index,uuid")
    if done.problem:
        return unknown(f"nvidia-smi: {done.problem}")
    said = done.out + done.err
    for sentence in _LOST:
        if sentence in said:
            line = next(line for line in said.splitlines() if sentence in line)
            return Result(FAIL, line.strip(), "lost", severity=DRAIN_NOW)
    if "No devices were found" in said:
        return Result(FAIL, f"the driver finds no GPU, {expected} expected", "count")
    if "couldn't communicate with the NVIDIA driver" in said:
        return Result(FAIL, "the driver does not answer nvidia-smi", "driver")
    if done.code != 0:
        return unknown("nvidia-smi ended with {}: {}".format(done.code, " ".join(said.split())[:200]))
    return _judge(done.out, expected)


def _query(host: Host, fields: str) -> child.Finished:
    return host.tool("nvidia_smi", "/usr/bin/nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits")


def _judge(text: str, expected: int) -> Result:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(
        len(row) not in (2, 3) or not row[0].isdigit() or not row[1].startswith(("GPU-", "MIG-")) for row in rows
    ):
        return unknown("nvidia-smi answers in a form that we do not know: {}".format(" ".join(text.split())[:200] or "nothing"))
    for row in rows:
        told = row[2].lower() if len(row) == 3 else ""
        if told in _NOT_TOLD:
            continue
        if told not in _ACTIONS:
            return unknown(f"GPU {row[0]} asks for {row[2]!r}, which we do not know")
        if _ACTIONS[told]:
            return Result(FAIL, f"GPU {row[0]} asks for: {row[2]}", _ACTIONS[told], "g" + row[0], severity=DRAIN_NOW)
    if len({row[1] for row in rows}) < expected:
        return Result(FAIL, f"{len(rows)} of {expected} GPUs are there", "count")
    return Result(OK, f"{len(rows)} GPUs")
