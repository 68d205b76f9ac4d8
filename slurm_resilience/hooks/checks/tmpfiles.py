"""Has the ended job's user left files in /dev/shm or /tmp, with no other job of his on this node?

With ``fix`` they are removed: only what belongs to that user, on the same file system, by directory handles, never
through a symlink.  What cannot be removed is the job's fault and never drains.
"""

import itertools
import os
import stat
import time

from .. import files
from . import FLAG, JOB, OK, WARN, Host, Result, unknown
from . import processes as table

NAME = "tmpfiles"
CONTEXTS = ("epilog",)
TIMEOUT_S = 6.0
SEVERITY = "flag"
LEAST_UID = 1000
MOST_ENTRIES = 20000
PORTION = 1000
DEEPEST = 64
CLOCK_TICK_S = 0.02  # files are dated by the last tick


def check(host: Host) -> Result:
    job, uid = getattr(host.job, "id", ""), getattr(host.job, "uid", -1)
    if not job or uid < host.number("least_uid", LEAST_UID):
        return Result(OK, "no job of an ordinary user has ended")
    paths = host.options.get("paths")
    folders = [str(path) for path in paths] if isinstance(paths, list) else ["/dev/shm", "/tmp"]  # noqa: S108
    found = [(folder, name) for folder in folders for name in _of(host, folder, uid)]
    if not found:
        return Result(OK, "nothing is left")
    text = "user {} left {} files in {}".format(uid, len(found), ", ".join(sorted({folder for folder, _ in found})))
    others = [process.pid for process in table.of_uid(host, uid) if table.job_of(host, process.pid) != job]
    if others:
        return Result(OK, text + ", and runs something else here")
    asked = time.time() - CLOCK_TICK_S
    rows = jobs_here(host, uid)
    if rows is None:
        return unknown("squeue does not tell whether the user has another job here")
    if [row for row in rows if row[0] != job and row[1] != "COMPLETING"]:
        return Result(OK, text + ", and has another job here")
    if not host.options.get("fix", False):
        return Result(WARN, text, "left", blame=JOB, severity=FLAG)
    kept = 0
    for folder, name in found:
        kept += _remove(host, folder, name, uid, asked)
    if kept:
        return Result(WARN, text + f"; {kept} cannot be removed", "kept", blame=JOB, severity=FLAG)
    return Result(WARN, text + "; removed", "left", blame=JOB, severity=FLAG)


def _of(host: Host, folder: str, uid: int) -> "list[str]":
    found = []
    try:
        with os.scandir(host.path(folder)) as entries:
            for entry in itertools.islice(entries, MOST_ENTRIES):
                try:
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        found.append(entry.name)
                except OSError:
                    continue
    except OSError:
        return []
    return sorted(found)


def jobs_here(host: Host, uid: int) -> "list[tuple[str, str]] | None":
    """(job, state) of this user's jobs on this node; None when Slurm does not say: that is not "none"."""
    done = host.tool("squeue", "/usr/bin/squeue", "-h", "-w", host.node, "-u", str(uid), "-o", "%A %U %T")
    if done.code != 0:
        return None
    rows = []
    for line in done.out.splitlines():
        words = line.split()
        if len(words) != 3 or not words[0].isdigit() or not words[1].isdigit():
            return None
        if int(words[1]) == uid:
            rows.append((words[0], words[2]))
    return rows


def _remove(host: Host, folder: str, name: str, uid: int, asked: float) -> int:
    """Remove one entry of a folder and all below it; how many entries had to stay.

    What was made or changed since Slurm was ``asked`` may be a new job's of the same user.
    """
    try:
        fd = os.open(host.path(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 1
    try:
        return _remove_at(host, fd, name, uid, (os.fstat(fd).st_dev, _mount_of(fd)), asked, 0)
    finally:
        os.close(fd)


def _mount_of(fd: int) -> str:
    """The mount that a descriptor is on: a folder that was bound into another has the same device, and is not of it.

    Source: proc(5), fdinfo (Linux 3.15 and newer).
    """
    for line in files.read(f"/proc/self/fdinfo/{fd}", 4096).splitlines():
        if line.startswith("mnt_id:"):
            return line
    return ""


def _remove_at(host: Host, at: int, name: str, uid: int, where: "tuple[int, str]", asked: float, depth: int) -> int:
    if depth > DEEPEST or time.monotonic() > host.deadline - 0.5:
        return 1
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        if found.st_uid != uid or found.st_dev != where[0] or found.st_ctime > asked:
            return 1
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=at)
            return 0
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return 0
    except OSError:
        return 1
    kept = 0
    try:
        same = os.fstat(fd)
        if (same.st_ino, same.st_dev, same.st_uid) != (found.st_ino, where[0], uid) or _mount_of(fd) != where[1]:
            return 1
        while True:  # in portions: a job may leave millions of names
            with os.scandir(f"/proc/self/fd/{fd}") as entries:
                portion = [entry.name for entry in itertools.islice(entries, PORTION)]
            before = kept
            for child in portion:
                kept += _remove_at(host, fd, child, uid, where, asked, depth + 1)
            if len(portion) < PORTION or kept > before:
                break
    except OSError:
        kept += 1
    finally:
        os.close(fd)
    if kept == 0:
        try:
            os.rmdir(name, dir_fd=at)
        except OSError:
            kept = 1
    return kept
