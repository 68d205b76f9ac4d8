"""Files that root reads, writes and trusts: no symlink is followed, no half file is seen, no torn state stops us."""

import fcntl
import json
import os
import stat
import time

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


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


def read_json(path: str) -> "dict[str, object]":
    """A state file's document; {} where it is missing, torn, too large or not ours: state is a help, never a condition."""
    try:
        value = json.loads(read(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: str, value: object) -> None:
    """Replace a state file, readable by root only: all of it or nothing.  Raises OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.unlink(temporary)
    except OSError:
        pass
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(value, sort_keys=True).encode() + b"\n")
    finally:
        os.close(fd)
    os.rename(temporary, path)


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


def distrust(path: str, owner: int = 0) -> str:
    """Why root must not run or believe this file; "" when it may: all of the path is root's and nobody else can write it."""
    if not path.startswith("/"):
        return f"{path} is not an absolute path"
    at = ""
    for part in [""] + [piece for piece in path.split("/") if piece]:
        at = at.rstrip("/") + "/" + part
        try:
            found = os.lstat(at)
        except OSError as error:
            return f"{at}: {error.strerror}"
        if found.st_uid not in (0, owner):
            return f"{at} belongs to uid {found.st_uid}, not to root"
        if stat.S_ISLNK(found.st_mode):
            # /bin -> usr/bin and the like: a link of root's in a folder of root's is as good as a file
            rest = path[len(at) :]
            target = os.path.join(os.path.dirname(at), os.readlink(at))
            return distrust(os.path.normpath(target) + rest, owner)
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
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(self.fd)
                    self.fd = -1
                    return False
            time.sleep(0.02)

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
