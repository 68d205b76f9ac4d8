"""What happened on this node, one JSON object a line, for root only; said to syslog too.  Recording never raises."""

import json
import os
import time

from . import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

NAME = "ledger.jsonl"
MOST_BYTES = 32 << 20  # should logrotate be missing


def record(world: "World", what: str, **fields: object) -> None:
    """Add one line.  Where the disk does not take it, syslog alone has it."""
    entry = {
        "v": 1,
        "at": round(time.time(), 3),
        "node": world.node,
        "boot": world.boot,
        "context": world.context,
        "what": what,
    }
    if world.job.id:
        entry["job"] = world.job.id
    for key, value in fields.items():
        entry[key] = value[:2000] if isinstance(value, str) else value
    line = json.dumps(entry, sort_keys=True)
    written = False
    if world.state:
        path = world.path(NAME)
        try:
            if os.path.exists(path) and os.path.getsize(path) > MOST_BYTES:
                os.rename(path, path + ".1")
            files.append(path, line)
            written = True
        except OSError:
            pass  # a full or read-only disk is what syslog below is for
    if what != "job_ended" or not written:
        _say(line)


def _say(line: str) -> None:
    try:
        import syslog

        syslog.openlog("slurm-resilience", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_WARNING, line[:1000])
    except (ImportError, OSError):
        pass


def entries(path: str, newest_bytes: int = 8 << 20) -> "list[dict[str, object]]":
    """The lines of a ledger that are whole; a torn one, as a crash leaves it, is passed over."""
    found = []
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - newest_bytes))
            data = file.read()
    except OSError:
        return []
    for line in data.splitlines():
        try:
            entry = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found
