"""Has the NVIDIA driver reported an error (XID) that takes the GPU out, since we last looked?

Only the kernel's own lines count, each once.  What an application did wrong is the application's; a code that nobody
knows is flagged, since new drivers add codes; a lasting one is forgotten when the node was booted anew or the driver
says that the GPU needs nothing any more.  Source of the table: NVIDIA XID catalog (Ampere and newer), immediate actions.
"""

import re

from ..world import boot_id
from . import DRAIN_NOW, FAIL, FLAG, JOB, NODE, OK, WARN, Host, Result, unknown
from .kernel_log import Unreadable, since

NAME = "xid"
CONTEXTS = ("epilog", "periodic", "boot")
TIMEOUT_S = 3.0
SEVERITY = "drain"


def _codes(text: str) -> "frozenset[int]":
    codes = []  # type: list[int]
    for part in text.split():
        low, _, high = part.partition("-")
        codes.extend(range(int(low), int(high or low) + 1))
    return frozenset(codes)


APPLICATION = _codes("8 11 13 25 31 32 39-41 43 45 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139")
NOTICE = _codes("37 38 44 63 66 67 78 92 93 106 107 121 137 141 152-154 156 157 160 161")
DRAIN = _codes("46 54 62 64 74 109 110 119 120 136 143-151 155 158")
DRAIN_AT_ONCE = _codes("48 79 95 140")
# At the start only: the kernel puts names of processes and files, which users choose, into other lines of its own
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),? ?(.*)")


def check(host: Host) -> Result:
    memo = host.memo()
    boot = boot_id()
    cursor = memo.get("cursor")
    try:
        lines, cursor = since(host, boot, cursor if isinstance(cursor, dict) else {})
    except Unreadable as error:
        return unknown(str(error))
    lasting = memo.get("lasting") if memo.get("boot") == boot else None
    result = judge(lines)
    if isinstance(lasting, dict) and lasting.get("status") == FAIL and result.status != FAIL and not _acknowledged(host):
        result = Result.from_dict(lasting)
    host.remember(
        {"cursor": cursor, "boot": boot, "lasting": result.to_dict() if result.status == FAIL else None, "codes": codes(lines)}
    )
    return result


def _acknowledged(host: Host) -> bool:
    """Does a driver that tells recovery actions say of every GPU that it needs none (any more)?"""
    if not host.options.get("nvidia_smi"):
        return False
    done = host.tool("nvidia_smi", "", "--query-gpu=index,gpu_recovery_action", "--format=csv,noheader")
    rows = [[cell.strip().lower() for cell in line.split(",")] for line in done.out.splitlines() if line.strip()]
    return done.code == 0 and bool(rows) and all(len(row) == 2 and row[0].isdigit() and row[1] == "none" for row in rows)


def judge(lines: "list[str]") -> Result:
    """The worst of what these lines say."""
    worst = Result(OK, "no XID")
    rank = 0
    for line in lines:
        found = _LINE.match(line)
        if not found:
            continue
        device, code, rest = found.group(1), int(found.group(2)), found.group(3)
        text = f"XID {code} on {device}: {rest}"[:300]
        word = str(code)
        if code in DRAIN_AT_ONCE:
            this = (4, Result(FAIL, text, word, severity=DRAIN_NOW))
        elif code in DRAIN and "nonfatal" in rest.lower():
            this = (2, Result(WARN, text, word, severity=FLAG))
        elif code in DRAIN:
            this = (3, Result(FAIL, text, word))
        elif code in APPLICATION:
            this = (1, Result(WARN if code != 45 else OK, text, word, blame=JOB, severity=FLAG))
        elif code in NOTICE:
            this = (2, Result(WARN, text, word, severity=FLAG))
        else:
            this = (2, Result(WARN, text + " (an XID that we do not know)", word, blame=NODE, severity=FLAG))
        if this[0] > rank:
            rank, worst = this
    return worst


def codes(lines: "list[str]") -> "list[int]":
    """The distinct codes in these lines, for the ledger."""
    return sorted({int(found.group(2)) for found in (_LINE.match(line) for line in lines) if found})
