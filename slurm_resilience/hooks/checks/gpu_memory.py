"""Has a GPU run out of spare memory rows, or is one waiting for a reset to use a spare?

A failed remap is a GPU to be replaced; a pending one takes a reset when the node is idle.
Source: NVIDIA GPU memory error management, "RMA policy thresholds for row-remapping".
"""

from . import FAIL, FLAG, OK, WARN, Host, Result, unknown

NAME = "gpu_memory"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 8.0
SEVERITY = "drain"

_YES_NO = {"yes": True, "1": True, "no": False, "0": False}


def check(host: Host) -> Result:
    if int(host.number("count", 0)) == 0:
        return Result(OK, "no GPU is expected here")
    done = host.tool("nvidia_smi", "/usr/bin/nvidia-smi", "--query-remapped-rows=gpu_uuid,remapped_rows.pending,"
                     "remapped_rows.failure", "--format=csv,noheader")  # fmt: skip
    if done.problem:
        return unknown(f"nvidia-smi: {done.problem}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines() if line.strip()]
    if done.code != 0 or not rows or any(len(row) != 3 or not row[0].startswith("GPU-") for row in rows):
        return unknown("nvidia-smi answers in a form that we do not know: {}".format(" ".join(done.out.split())[:200]))
    pending = []
    for index, row in enumerate(rows):
        told = [_YES_NO.get(cell.lower()) for cell in row[1:]]
        if told[1]:
            return Result(FAIL, f"{row[0]} has no spare rows left", "remap", f"g{index}")
        if told[0]:
            pending.append(row[0])
        if None in told and not all(cell.lower() in ("[n/a]", "n/a", "[not supported]") for cell in row[1:]):
            return unknown(f"{row[0]} says {row[1:]!r}")
    if pending:
        return Result(WARN, "{} waits for a reset to use a spare row".format(", ".join(pending)), "pending", severity=FLAG)
    return Result(OK, f"{len(rows)} GPUs")
