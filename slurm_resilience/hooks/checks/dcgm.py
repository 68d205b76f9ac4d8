"""What does DCGM's passive health watch say, where a site runs it?

Passive only: its diagnostics take GPUs away from jobs.  A host engine that hangs is unknown (cluster-toolkit#6230), and so
is an answer in another form (IBM/autopilot#68).  The watch has to be switched on before (dcgmi health --set a), or there is
nothing to be told.  Source: NVIDIA DCGM documentation, dcgmi health.
"""

import re

from . import FAIL, FLAG, OK, WARN, Host, Result, unknown

NAME = "dcgm"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 8.0
SEVERITY = "drain"

_OVERALL = re.compile(r"Overall Health[\s:|]*(Healthy|Warning|Failure)\b")
_GPU = re.compile(r"GPU ID: (\d+)[\s|]*(Healthy|Warning|Failure)\b")


def check(host: Host) -> Result:
    if not host.options.get("dcgmi"):
        return Result(OK, "DCGM is not asked")
    done = host.tool("dcgmi", "/usr/bin/dcgmi", "health", "--check", "--group", str(int(host.number("group", 0))))
    if done.problem:
        return unknown(f"dcgmi: {done.problem}")
    return judge(done.out, done.err)


def judge(text: str, err: str = "") -> Result:
    """What dcgmi says.  Its exit code is not asked: it is 0 for failures in some releases."""
    overall = _OVERALL.findall(text)
    if len(overall) != 1:
        said = " ".join((text + err).split())[:200]
        return unknown("dcgmi answers in a form that we do not know: {}".format(said or "nothing"))
    gpus = [(index, word) for index, word in _GPU.findall(text) if word == overall[0]]
    where = "g" + gpus[0][0] if gpus and overall[0] != "Healthy" else ""
    rows = [" ".join(line.strip("| \t").split("|")[-1].split()) for line in text.splitlines()]
    said = next((row for row in rows if re.match(r"[A-Za-z ]+: (?:Warning|Failure) - ", row)), "")
    if overall[0] == "Failure":
        return Result(FAIL, said or "DCGM says Failure", "failure", where)
    if overall[0] == "Warning":
        return Result(WARN, said or "DCGM says Warning", "warning", where, severity=FLAG)
    return Result(OK, "DCGM says Healthy")
