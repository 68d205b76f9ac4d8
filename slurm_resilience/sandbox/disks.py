"""Small disks that can be full: a tmpfs at a path, the same one on every host of the sandbox."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from slurm_resilience.errors import ConfigError, SandboxError
from slurm_resilience.sandbox.layout import PREFIX, Layout

BALLAST = ".sandbox-ballast"


def size_bytes(text: str) -> int:
    """``64M``, ``2G``, ``4096``.  Raises :class:`ConfigError` for anything else."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in units or not int(number):
        raise ConfigError(f"{text!r} is not a size", evidence="a size is a number with K, M or G, such as 64M")
    return int(number) * units[unit]


def source_name(layout: Layout) -> str:
    """What mountinfo shows as the source of a small disk of this sandbox."""
    return f"{PREFIX}-{layout.name}-disk"


def mounted(layout: Layout) -> list[str]:
    """Where the sandbox's small disks are mounted on this machine."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            fields = line.split()
            if fields[fields.index("-") + 2] == source_name(layout):
                found.append(
                    fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
                )
    return found


def remove_all(layout: Layout) -> None:
    """No small disk of the sandbox is mounted on this machine any more."""
    for path in reversed(mounted(layout)):
        from slurm_resilience.sandbox import kernel

        kernel.unmount(path)


def create(layout: Layout, path: Path, size: int, uid: int, gid: int) -> None:
    """Mount a small disk at ``path``, an empty or missing folder, for a user.  Other hosts get it by :func:`copy_of`."""
    from slurm_resilience.sandbox import kernel

    path.mkdir(parents=True, exist_ok=True, mode=0o755)
    if any(path.iterdir()):
        raise SandboxError(
            f"{path} is not empty, and a disk mounted there would hide what is in it",
            remedy="name a new or an empty folder, and make the disk before the job starts",
        )
    options = f"size={size},mode=0755,uid={uid},gid={gid}"
    kernel.mount(source_name(layout), str(path), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def fill(path: Path, leave: int) -> int:
    """Write ballast until only ``leave`` bytes are free; the bytes written.  Raises OSError for any reason but a full disk."""
    written = 0
    fd = os.open(path / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        chunk = bytes(1 << 16)
        while True:
            disk = os.fstatvfs(fd)
            free = disk.f_bavail * disk.f_frsize
            if free <= leave:
                return written
            try:
                written += os.write(fd, chunk[: min(len(chunk), free - leave)])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return written
    finally:
        os.close(fd)


def empty(path: Path) -> None:
    """Take the ballast away again."""
    (path / BALLAST).unlink(missing_ok=True)
