"""What jobs say about this node: untrusted, and never more than a reason for root's own checks to look deeper.

The drop box of a node, BOX/NODE, is root's with mode 1733: any user can put a file in, only root can list it.  A file
counts only when it is an ordinary, small one whose owner is the user that it speaks of.

    {"v": 1, "node": "n3", "job": 123, "cause": "rank_crash", "attempt": 4, "at": 1796001234.5}
"""

import json
import os
import stat

from . import ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

BOX = "/run/slurm-resilience-hints"
MOST_FILES = 50
MOST_BYTES = 4096
CAUSES = (
    "preemption", "time_limit", "node_lost", "node_drained", "launch_failed", "rank_crash", "hang", "bad_checkpoint", "oom",
    "app_error", "config_error", "cancelled", "unknown",
)  # fmt: skip


def prepare(box: str, node: str) -> str:
    """The node's drop box, made and as it must be.  Raises OSError."""
    path = os.path.join(box, node)
    for folder, mode in ((box, 0o755), (path, 0o1733)):  # anybody puts in, nobody lists
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(f"{folder} is not a folder of root's")
        os.chmod(folder, mode)
    return path


def collect(world: "World") -> "list[dict[str, object]]":
    """The hints about this node, taken out of the box and written into the ledger; rubbish is thrown away."""
    try:
        box = prepare(world.text("hints", "box", BOX), world.node)
        at = os.open(box, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        ledger.record(world, "own_error", error=f"hints: {error}")
        return []
    found = []
    try:
        for name in sorted(os.listdir(at))[:MOST_FILES]:
            hint = _read(at, name, world.node)
            try:
                os.unlink(name, dir_fd=at)
            except OSError:
                continue  # a folder: not ours to take apart
            if hint:
                found.append(hint)
                ledger.record(world, "hint", **hint)
    finally:
        os.close(at)
    return found


def _read(at: int, name: str, node: str) -> "dict[str, object]":
    """The hint in a file, reduced to what we know; {} for anything that is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError:
        return {}
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES or found.st_nlink != 1:
            return {}
        value = json.loads(os.read(fd, MOST_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    finally:
        os.close(fd)
    if not isinstance(value, dict) or value.get("v") != 1 or value.get("node") != node or value.get("cause") not in CAUSES:
        return {}
    hint = {"cause": value["cause"], "uid": found.st_uid}
    for key in ("job", "attempt"):
        number = value.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 10**12:
            hint["hinted_" + key] = number
    return hint
