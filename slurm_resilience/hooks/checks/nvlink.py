"""Are as many NVLinks of each GPU up as this model has in this machine?

How many that is differs by machine: an H100 PCIe has 18 links of which a bridge uses 12, so the site says the number, and
without one nothing is asked.  Source: nvidia-smi nvlink --status; Azure/azhpc-diagnostics#73, azurehpc-health-checks#162.
"""

import re

from . import FAIL, OK, Host, Result, unknown

NAME = "nvlink"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 8.0
SEVERITY = "drain"

_GPU = re.compile(r"GPU (\d+): .*\(UUID: \S+\)\Z")
_LINK = re.compile(r"Link (\d+): (?:(<inactive>)|[0-9.]+ GB/s)\Z")
_NONE_UP = "all links are inactive"


def check(host: Host) -> Result:
    expected = int(host.number("links", 0))
    if expected <= 0:
        return Result(OK, "no NVLink is expected here")
    done = host.tool("nvidia_smi", "/usr/bin/nvidia-smi", "nvlink", "--status")
    if done.problem or done.code != 0:
        return unknown("nvidia-smi nvlink: {}".format(done.problem or " ".join((done.out + done.err).split())[:200]))
    return judge(done.out, expected)


def judge(text: str, expected: int) -> Result:
    """What nvidia-smi says; a line that we do not know makes all of it unknown."""
    up = {}  # type: dict[str, int]
    gpu = ""
    for line in [line.strip() for line in text.splitlines() if line.strip()]:
        head, link = _GPU.match(line), _LINK.match(line)
        if head:
            gpu = head.group(1)
            up[gpu] = 0
        elif gpu and link:
            up[gpu] += 0 if link.group(2) else 1
        elif not (gpu and _NONE_UP in line.lower()):
            return unknown(f"nvidia-smi nvlink answers in a form that we do not know: {line[:200]}")
    if not up:
        return unknown("nvidia-smi nvlink names no GPU")
    for gpu, links in sorted(up.items()):
        if links < expected:
            return Result(FAIL, f"GPU {gpu} has {links} of {expected} NVLinks up", "links", "g" + gpu)
    return Result(OK, f"{expected} NVLinks or more on each of {len(up)} GPUs")
