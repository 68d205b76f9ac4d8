"""Which nodes do crashes follow?  Pure arithmetic on the history of a run.

A crash says little about its node; a second one there, while the others have none, says more.  The count is kept over
progress, since a node that crashes every second attempt lets checkpoints pass in between, and is dropped when the node comes
back from a reboot.  Crashes that follow a rank, not a node, clear it by themselves: left out, it has no more, and another has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Ends that may be a node's own fault.  A lost node is out anyway; preemption and the like are nobody's.
COUNTED = frozenset({"rank_crash", "hang", "launch_failed", "oom"})
_ENOUGH = 2
# An exception speaks of the code that raised it, unless it names what is under the code.
_HARDWARE = re.compile(
    r"cuda error|hip error|cublas|cudnn|ecc\b|xid|nvlink|uncorrectable|device-side|bus error|input/output error"
    r"|illegal instruction",
    re.IGNORECASE,
)


def speaks_of_node(cause: str, signature: str) -> bool:
    """Whether a fault counts against the node on which it began.  ``signature``: of the user's exception, "" without one."""
    return cause in COUNTED and (not signature or _HARDWARE.search(signature) is not None)


def suspects(crashes: Mapping[str, int]) -> dict[str, str]:
    """Node → why it is a suspect: twice as many crashes began there as on any other node, and at least two."""
    out = {}
    worst = sorted(crashes, key=lambda node: -crashes[node])[:2]
    for node, count in crashes.items():
        others = max((crashes[name] for name in worst if name != node), default=0)
        if count >= _ENOUGH and count >= 2 * others:
            rest = f"and {others} on any other" if others else "and none elsewhere"
            out[node] = f"{count} crashes began there, {rest}"
    return out
