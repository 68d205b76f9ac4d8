"""Which jobs' epilogs began on this node and never ended?  A mark of our own, for Slurm forgets: a killed slurmd reports 0."""

import os
import time

from . import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

FOLDER = "epilogs"
MOST = 5  # in one prolog or one periodic run


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
        mark = files.read_json(os.path.join(world.path(FOLDER), name))
        pid = int(str(mark.get("pid", 0)) or 0)
        if mark.get("job") and (mark.get("boot") != world.boot or not pid or _start(pid) != mark.get("start")):
            found.append(mark)
    return found[:MOST]


def _path(world: "World", job: str) -> str:
    return os.path.join(world.path(FOLDER), f"{int(job)}.json")


def _start(pid: int) -> str:
    try:
        stat = files.read(f"/proc/{pid}/stat", 4096)
    except OSError:
        return ""
    return stat[stat.rfind(")") + 2 :].split()[19]
