"""Which jobs' epilogs began on this node and never ended?  A mark of our own, for Slurm forgets: a killed slurmd reports 0."""

import os
import re
import time

from . import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

FOLDER = "epilogs"
MOST = 5  # in one prolog or one periodic run
_NAME = re.compile(r"[0-9]{1,12}\.json\Z")


def begin(world: "World") -> None:
    """The epilog of this job has begun, in this process, in this boot."""
    files.private_folder(world.path(FOLDER))
    files.write_json(
        _path(world, world.job.id),
        {"job": world.job.id, "uid": world.job.uid, "boot": world.boot, "pid": os.getpid(), "start": _start(os.getpid()),
         "at": time.time()},
    )  # fmt: skip


def end(world: "World", job: str) -> None:
    """Its checks have been made, and what follows from them is done or kept."""
    files.remove(_path(world, job))


def unfinished(world: "World") -> "list[dict[str, object]]":
    """The epilogs whose process is gone, or was of another boot."""
    try:
        names = sorted(os.listdir(world.path(FOLDER)))
    except OSError:
        return []
    found = []
    for name in names:
        if not _NAME.match(name):
            continue  # one that is being written, or whose writer was killed
        mark = files.read_json(os.path.join(world.path(FOLDER), name))
        pid = files.integer(mark.get("pid"))
        if mark.get("boot") != world.boot or not pid or _start(pid) != mark.get("start"):
            # Of a mark that cannot be read the name is left; who its user was nobody knows any more
            found.append({"job": name[:-5], "uid": files.integer(mark.get("uid"), -1), "boot": mark.get("boot", world.boot)})
    return found[:MOST]


def _path(world: "World", job: str) -> str:
    return os.path.join(world.path(FOLDER), f"{int(job)}.json")


def _start(pid: int) -> str:
    try:
        stat = files.read(f"/proc/{pid}/stat", 4096)
    except OSError:
        return ""
    words = stat[stat.rfind(")") + 2 :].split()
    return words[19] if len(words) > 19 else ""
