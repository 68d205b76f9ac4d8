"""The system calls that Python 3.10 does not have: namespaces, mounts, parent-death signals.

Standard library only: the init of each node and `enter` start with this and nothing more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_SLAVE = 1 << 19
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

_SYS_OPEN_TREE = 428  # the same number on every architecture, as all calls since Linux 5.1
_SYS_MOVE_MOUNT = 429
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` for new ones (PID and time: the children's, not this process's)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter the namespace(s) behind ``fd``: one file of /proc/PID/ns, or a pidfd with several flags (Linux 5.8)."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None),
        f"mount {source} on {target}",
    )


def unmount(target: str) -> None:
    """Nothing is mounted at ``target`` any more, or never was.  The name goes at once, the file system with its last user."""
    if _libc.umount2(target.encode(), MNT_DETACH) < 0 and ctypes.get_errno() != errno.EINVAL:  # EINVAL: not a mount point
        _check(-1, f"umount {target}")


def open_tree(path: str) -> int:
    """A file descriptor of a copy of the mount at ``path``, to be attached in another mount namespace (Linux 5.2)."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    return _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def move_mount(fd: int, target: str) -> None:
    """Attach what :func:`open_tree` gave at ``target`` of this process's mount namespace."""
    _check(
        _libc.syscall(_SYS_MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH), f"move_mount {target}"
    )


def die_with_parent(signal_number: int) -> None:
    """Get ``signal_number`` when the parent dies.  A change of user clears it, so call it after that."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def set_process_name(name: str) -> None:
    """What /proc/PID/comm says; at most 15 bytes."""
    _check(_libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl")


def default_signals() -> None:
    """Undo what Python ignores before another program starts: exec keeps ignored signals ignored, and a shell whose
    pipelines do not die of SIGPIPE behaves strangely."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
