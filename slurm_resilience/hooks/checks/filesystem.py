"""Is each file system that jobs need mounted, writable, answering, and not full?

Runs in a child that can be killed, as all checks do: a dead NFS server makes stat() hang.  A hang is unknown: most often
it is the server, and the server is not this node.
"""

import os

from . import FABRIC, FAIL, FLAG, NODE, OK, WARN, Host, Result, unknown

NAME = "filesystem"
CONTEXTS = ("prolog", "epilog", "periodic", "boot")
TIMEOUT_S = 4.0
SEVERITY = "drain"
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse", "cifs", "wekafs")


def check(host: Host) -> Result:
    wanted = host.options.get("paths")
    if not isinstance(wanted, list) or not wanted:
        return Result(OK, "no file system is asked for")
    mounts = mounted(host.read("/proc/self/mountinfo"))
    if not mounts:
        return unknown("/proc/self/mountinfo cannot be read")
    worst = Result(OK, f"{len(wanted)} file systems")
    for item in wanted:
        path = str(item.get("path", "")) if isinstance(item, dict) else str(item)
        options = item if isinstance(item, dict) else {}
        this = _one(host, path, options, mounts)
        if this.status == FAIL:
            return this
        worst = this if worst.status == OK else worst
    return worst


def mounted(text: str) -> "dict[str, tuple[str, set[str]]]":
    """Mount point -> (type, options of mount and file system).  Source: proc(5), mountinfo."""
    found = {}
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if dash and len(words) >= 6 and len(kinds) >= 3:
            point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            found[point] = (kinds[0], set(words[5].split(",")) | set(kinds[2].split(",")))
    return found


def _one(host: Host, path: str, options: "dict[str, object]", mounts: "dict[str, tuple[str, set[str]]]") -> Result:
    name = os.path.basename(path) or "root"
    point = path
    while point not in mounts and point != "/":
        point = os.path.dirname(point)
    kind, flags = mounts.get(point, ("", set()))
    remote = kind.split(".")[0] in NETWORK
    if options.get("mount", False) and point != path:
        return Result(FAIL, f"{path} is not mounted", "mount", name, blame=FABRIC if options.get("type") in NETWORK else NODE)
    if not options.get("read_only_ok", False) and "ro" in flags:
        return Result(FAIL, f"{path} is read-only ({kind})", "ro", name)
    try:
        space = os.statvfs(host.path(path))
    except OSError as error:
        return Result(FAIL, f"{path}: {error.strerror}", "io", name, blame=FABRIC if remote else NODE)
    free = 100.0 * space.f_bavail / space.f_blocks if space.f_blocks else 100.0
    nodes = 100.0 * space.f_favail / space.f_files if space.f_files else 100.0
    least = options.get("free_percent", 1)
    least = float(least) if isinstance(least, (int, float)) else 1.0
    if free < least or nodes < least:
        what = "space" if free < least else "inodes"
        text = f"{path} has {min(free, nodes):.1f} % of its {what} free"
        # Any user can fill /tmp on one node after the other: never a reason to drain unless the site says so
        if options.get("full_drains", False):
            return Result(FAIL, text, "full", name)
        return Result(WARN, text, "full", name, blame="job", severity=FLAG)
    return Result(OK, path)
