"""Leaves a word about this node for root's own checks, where an admin has made a place for it; never more than a word.

Root reads it as untrusted data (see ``hooks.hints``): it makes the checks look deeper and enters the node's ledger, and drains
nothing.  Where no such place is, there is nobody to tell.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping

BOX = "/run/slurm-resilience-hints"
PLACE = "RESILIENCE_HINTS"  # another place, where a site has one


def leave_hint(node: str, *, cause: str, attempt: int, at: float, environ: Mapping[str, str]) -> str:
    """Put the hint into the node's box; "" when it is there or nobody wants it, else why it is not.  Never raises."""
    box = os.path.join(environ.get(PLACE) or BOX, node)
    job = environ.get("SLURM_JOB_ID", "")
    hint = {
        "v": 1,
        "node": node,
        "cause": cause,
        "attempt": attempt,
        "at": round(at, 3),
        "job": int(job) if job.isdigit() else 0,
    }
    path = os.path.join(box, secrets.token_hex(8))
    try:
        if os.lstat(box).st_uid != 0:
            return f"{box} is not root's"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(hint).encode())
        finally:
            os.close(fd)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{box}: {error.strerror}"
    return ""
