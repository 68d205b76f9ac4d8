"""Files that root reads, writes and trusts: no symlink is followed, no half file is seen, no torn state stops us."""

import fcntl
import json
import os
import stat
import time

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_LINKS = 40
STALE_S = 3600.0
HELD = set()  # type: set[int]  # descriptors of locks: a child that outlives us must not have them


def read(path: str, cap_bytes: int = 1 << 20) -> str:
    """The text of a file that is no symlink, at most ``cap_bytes`` of it.  Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts, size = [], 0
        while size < cap_bytes:
            data = os.read(fd, min(65536, cap_bytes - size))
            if not data:
                break
            parts.append(data)
            size += len(data)
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "replace")


def read_json(path: str, cap_bytes: int = 1 << 20) -> "dict[str, object]":
    """A state file's document; {} where it is missing, torn, too large or not ours: state is a help, never a condition."""
    try:
        value = json.loads(read(path, cap_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def number(value: object, default: float = 0.0) -> float:
    """A finite number out of a state file; ``default`` for anything else, since a state file may have been torn or edited."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return default
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return default
    return found if abs(found) < 1e18 else default


def integer(value: object, default: int = 0) -> int:
    """Like :func:`number`, whole."""
    return int(number(value, default))


def write_json(path: str, value: object, sync: bool = False) -> None:
    """Replace a state file, for root only: all of it or nothing.  ``sync``: through a power cut too.  Raises OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    remove(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            data = json.dumps(value, sort_keys=True).encode() + b"\n"
            while data:  # a disk that is filling up takes a part first, and says so only at the next write
                data = data[os.write(fd, data) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        remove(temporary)
        raise


def sweep(folder: str) -> None:
    """Remove what writers left that were killed between writing and renaming; not what one of now is writing."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        try:
            if (name.endswith(".tmp") or name.startswith(".probe.")) and time.time() - os.lstat(path).st_mtime > STALE_S:
                os.unlink(path)
        except OSError:
            continue


def remove(path: str) -> None:
    """The file is gone."""
    try:
        os.unlink(path)
    except OSError:
        pass


def append(path: str, line: str) -> None:
    """Add one line in one write, so that two writers do not mix theirs.  Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode("utf-8", "replace") + b"\n")
    finally:
        os.close(fd)


def private_folder(path: str) -> str:
    """``path``, made when missing, that only our user can look into.  Raises OSError when it is anything else."""
    if not os.path.isdir(path):
        os.makedirs(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS_MAY_WRITE:
        raise OSError(f"{path} is not a folder that only root can write")
    return path


def distrust(path: str, owner: int = 0, links: int = MOST_LINKS) -> str:
    """Why root must not run or believe this file; "" when it may: all of the path is root's and nobody else can write it."""
    if not path.startswith("/"):
        return f"{path} is not an absolute path"
    if links == 0:
        return f"{path} is at the end of too many links"
    at = ""
    parts = [""] + [piece for piece in path.split("/") if piece]
    for index, part in enumerate(parts):
        at = at.rstrip("/") + "/" + part
        try:
            found = os.lstat(at)
        except OSError as error:
            return f"{at}: {error.strerror}"
        if found.st_uid not in (0, owner):
            return f"{at} belongs to uid {found.st_uid}, not to root"
        if stat.S_ISLNK(found.st_mode):
            # /bin -> usr/bin and the like: a link of root's in a folder of root's is as good as a file
            # Its ".." is left to the kernel's way of reading it: another file would be looked at than is run
            target = os.path.join(os.path.dirname(at), os.readlink(at))
            return distrust("/".join([target, *parts[index + 1 :]]), owner, links - 1)
        if found.st_mode & OTHERS_MAY_WRITE:
            return f"{at} can be written by others than root (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


class Lock:
    """One of us at a time on this node; :meth:`acquire` gives up after ``timeout_s`` and says so."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1

    def acquire(self, timeout_s: float = 0.0) -> bool:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                HELD.add(self.fd)
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(self.fd)
                    self.fd = -1
                    return False
            time.sleep(0.02)

    def release(self) -> None:
        """Also for children that were forked meanwhile: one that hangs for ever must not keep the lock."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            HELD.discard(self.fd)
            self.fd = -1
