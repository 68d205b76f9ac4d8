"""Is each GPU connected by as many PCIe lanes as it should be?

A down-trained link makes no XID and no error, only a slow job.  The site says the width: what nvidia-smi calls the maximum
is the chip's, and a card may have fewer lanes on its connector.  The generation is not looked at, for an idle GPU
lowers it; some lower the width too, hence a flag and no drain unless the site says so.
Source: nvidia-smi --help-query-gpu (pcie.link.width.current); NVIDIA/NVSentinel#890.
"""

from . import FAIL, OK, Host, Result, unknown

NAME = "pcie"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 5.0
SEVERITY = "flag"


def check(host: Host) -> Result:
    width = int(host.number("width", 0))
    if width <= 0:
        return Result(OK, "no PCIe width is expected here")
    done = host.tool("nvidia_smi", "/usr/bin/nvidia-smi", "--query-gpu=index,pcie.link.width.current",
                     "--format=csv,noheader,nounits")  # fmt: skip
    if done.problem or done.code != 0:
        return unknown("nvidia-smi: {}".format(done.problem or " ".join((done.out + done.err).split())[:200]))
    return judge(done.out, width)


def judge(text: str, width: int) -> Result:
    """What nvidia-smi says."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != 2 or not row[0].isdigit() or not row[1].isdigit() for row in rows):
        return unknown("nvidia-smi answers in a form that we do not know: {}".format(" ".join(text.split())[:200] or "nothing"))
    for index, lanes in rows:
        if int(lanes) < width:
            return Result(FAIL, f"GPU {index} is connected by {lanes} of {width} PCIe lanes", "width", "g" + index)
    return Result(OK, f"{width} lanes or more on each of {len(rows)} GPUs")
