"""What jobs say about this node: untrusted, and never more than a reason for root's own checks to look deeper.

The drop box of a node, BOX/NODE, is root's with mode 1733: any user can put a file in, only root can list it.  What is in
it counts only when it is an ordinary, small file.  Under /run the box is a file system of its own, of one megabyte, for a
user who fills /run takes the node down; and no user's hints keep another's from being read.

    {"v": 1, "node": "n3", "job": 123, "cause": "rank_crash", "attempt": 4, "at": 1796001234.5}
"""

import itertools
import json
import os
import stat

from . import ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

BOX = "/run/slurm-resilience-hints"
MOST_FILES = 50
MOST_OF_ONE_USER = 10
MOST_LOOKED_AT = 5000
MOUNT_OPTIONS = "size=1m,nr_inodes=2000,mode=755,nosuid,nodev,noexec"
MOST_BYTES = 4096
CAUSES = (
    "preemption", "time_limit", "node_lost", "node_drained", "launch_failed", "rank_crash", "hang", "bad_checkpoint", "oom",
    "app_error", "config_error", "cancelled", "unknown",
)  # fmt: skip


def prepare(box: str, node: str) -> str:
    """The node's drop box, made and as it must be.  Raises OSError."""
    path = os.path.join(box, node)
    _own_folder(box, 0o755)
    if box.startswith("/run/") and os.stat(box).st_dev == os.stat("/run").st_dev:
        _mount(box)
    _own_folder(path, 0o1733)  # anybody puts in, nobody lists
    return path


def _own_folder(folder: str, mode: int) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)  # what is looked at is what is changed
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise OSError(f"{folder} is not a folder of root's")
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _mount(box: str) -> None:
    from . import child

    for mount in ("/usr/bin/mount", "/bin/mount"):
        if os.path.exists(mount):
            done = child.run((mount, "-t", "tmpfs", "-o", MOUNT_OPTIONS, "slurm-resilience-hints", box), 3.0)
            if done.code == 0:
                return
            why = done.problem or done.err.strip()[:200]
            raise OSError(f"{box} cannot be given a size of its own: {why}")
    raise OSError(f"there is no mount for {box}")


def collect(world: "World") -> "list[dict[str, object]]":
    """The hints about this node, taken out of the box and written into the ledger; rubbish is thrown away."""
    try:
        box = prepare(world.text("hints", "box", BOX), world.node)
        at = os.open(box, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        ledger.record(world, "own_error", error=f"hints: {error}")
        return []
    found = []  # type: list[dict[str, object]]
    try:
        of_user = {}  # type: dict[int, int]
        for name in _names(at):
            uid = _owner(at, name)
            of_user[uid] = of_user.get(uid, 0) + 1
            wanted = of_user[uid] <= MOST_OF_ONE_USER and len(found) < MOST_FILES
            hint = _read(at, name, world.node) if wanted else {}
            if not _removed(at, name):
                continue  # a folder with something in it: not ours to take apart
            if hint:
                found.append(hint)
                ledger.record(world, "hint", **hint)
    finally:
        os.close(at)
    return found


def _names(at: int) -> "list[str]":
    """Some of the names in the box: of millions, only as many as are looked at are ever in memory."""
    with os.scandir(f"/proc/self/fd/{at}") as entries:
        return sorted(entry.name for entry in itertools.islice(entries, MOST_LOOKED_AT))


def _removed(at: int, name: str) -> bool:
    for remove in (os.unlink, os.rmdir):
        try:
            remove(name, dir_fd=at)
            return True
        except OSError:
            pass
    return _emptied(at, name)


def _emptied(at: int, name: str) -> bool:
    """A folder full of somebody's files is rubbish too, which would keep others' hints out for ever; two floors are enough."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_dev != os.fstat(at).st_dev:
            return False
        for inner in _names(fd):
            for remove in (os.unlink, os.rmdir):
                try:
                    remove(inner, dir_fd=fd)
                    break
                except OSError:
                    continue
        os.rmdir(name, dir_fd=at)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _owner(at: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False).st_uid
    except OSError:
        return -1


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
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    if not isinstance(value, dict) or value.get("v") != 1 or value.get("node") != node or value.get("cause") not in CAUSES:
        return {}
    hint = {"cause": value["cause"], "uid": found.st_uid}  # type: dict[str, object]
    for key in ("job", "attempt"):
        number = value.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 10**12:
            hint["hinted_" + key] = number
    when = value.get("at")
    if isinstance(when, float) and 0.0 <= when < 1e11:
        hint["hinted_at"] = when
    return hint
