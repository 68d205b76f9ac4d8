"""Crashes from outside: kill a process at its N-th system call, or record all its calls to replay them half done.

Both use strace on a process that waits to be traced, so that nothing of our own code is patched.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# every call by which a save changes the file system
CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir,link,linkat,ftruncate,close"
)
CHANGES = CALLS.replace("openat,open,", "").replace(",close", "") + ",openat"

_PR_SET_PTRACER = 0x59616D61


def allow_tracing() -> None:
    """Let any process of this user trace us; where Yama is not there, everybody of this user may anyway."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)


def why_not() -> str:
    """Why strace cannot be used here, "" when it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, text=True)
    return "" if probe.returncode == 0 else f"strace does not work here: {probe.stderr.strip()[-200:]}"


class Tracer:
    """An strace attached to a process's main thread, which does all of a save's calls, until it ends or :meth:`stop`."""

    def __init__(self, pid: int, *options: str) -> None:
        self._process = subprocess.Popen(
            ["strace", "-qq", "-p", str(pid), *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"strace did not attach: {self._process.stderr and self._process.stderr.read()}")
            time.sleep(0.002)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(60)


def wait_for_stop(pid: int, *, unless: Callable[[], bool], within_s: float = 90.0) -> bool:
    """Wait until a signal has stopped the process; False when ``unless`` came true first."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state in "Tt" and _group_stopped(pid):
            return True
        if unless():
            return False
        time.sleep(0.002)
    raise AssertionError(f"process {pid} was neither stopped nor done within {within_s} s")


def _group_stopped(pid: int) -> bool:
    """Stopped for good, and not only for a moment by its tracer: it stays so while the tracer has nothing to do."""
    tracer = re.search(r"^TracerPid:\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    for _ in range(25):
        time.sleep(0.002)
        if _state(pid) not in "Tt" or (tracer is not None and tracer[1] != "0" and _state(int(tracer[1])) != "S"):
            return False
    return True


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass(frozen=True)
class Call:
    """One system call as it was traced: when it began, by which process, its name, its raw arguments, its result."""

    at: float
    pid: int
    name: str
    arguments: str
    result: int


_LINE = re.compile(r"^(\d+\.\d+) (\w+)\((.*)\)\s*= (-?\d+)", re.DOTALL)


def read(folder: Path) -> list[Call]:
    """The calls in the files that ``strace -ff -ttt -xx -o folder/trace`` wrote, of all processes, in order of their begin."""
    calls = []
    for path in folder.glob("trace.*"):
        for line in path.read_text().splitlines():
            match = _LINE.match(line)
            if match:
                calls.append(Call(float(match[1]), int(path.suffix[1:]), match[2], match[3], int(match[4])))
    return sorted(calls, key=lambda call: call.at)


def strings(arguments: str) -> list[bytes]:
    """The quoted strings among the arguments."""
    return [bytes.fromhex(raw.replace("\\x", "")) for raw in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)]


@dataclass
class Inode:
    """A file's or directory's state: what a process sees, and what would be left after a power loss."""

    is_dir: bool
    data: bytes = b""
    safe_data: bytes = b""
    names: dict[str, Inode] = field(default_factory=dict)
    safe_names: dict[str, Inode] = field(default_factory=dict)
    unsafe: list[tuple[str, Inode | None]] = field(default_factory=list)

    def link(self, name: str, inode: Inode | None) -> None:
        """Give or (None) take a name in this directory."""
        if inode is None:
            self.names.pop(name, None)
        else:
            self.names[name] = inode
        self.unsafe.append((name, inode))

    def sync(self) -> None:
        self.safe_data = self.data
        self.safe_names = dict(self.names)
        self.unsafe = []


class Disk:
    """A file system that is told system calls one by one and can lose power between any two of them.

    An fsync of a file makes its bytes safe, an fsync of a directory the names in it; nothing else does.
    """

    def __init__(self, root: Path) -> None:
        self.prefix = os.fsencode(root)
        self.top = self._from(root)
        self._open: dict[tuple[int, int], tuple[Inode, int]] = {}

    def _from(self, path: Path) -> Inode:
        if path.is_dir():
            inode = Inode(True, names={child.name: self._from(child) for child in path.iterdir()})
        else:
            inode = Inode(False, path.read_bytes())
        inode.sync()
        return inode

    def _walk(self, raw: bytes) -> tuple[Inode, str] | None:
        """The directory that holds a path, and its last name; None for a path elsewhere."""
        if raw != self.prefix and not raw.startswith(self.prefix + b"/"):
            return None
        parts = [os.fsdecode(part) for part in raw[len(self.prefix) :].split(b"/") if part]
        where = self.top
        for part in parts[:-1]:
            where = where.names[part]
        return where, parts[-1] if parts else ""

    def _find(self, raw: bytes) -> Inode | None:
        found = self._walk(raw)
        if found is None:
            return None
        return found[0].names.get(found[1]) if found[1] else self.top

    def apply(self, call: Call) -> bool:
        """Do one call; whether it changed anything here, or made something safe."""
        if call.name == "close":
            fd = int(call.arguments.split(",")[0])
            self._open.pop((call.pid, fd), None)
            return False
        if call.result < 0:
            return False
        paths = strings(call.arguments)
        handler = getattr(self, f"_{call.name}", None)
        if handler is None:
            first = call.arguments.split(",")[0]
            if first.isdigit() and (call.pid, int(first)) not in self._open:
                return False  # a socket, an event
            raise NotImplementedError(call.name)
        return bool(handler(call, paths))

    def _openat(self, call: Call, paths: list[bytes]) -> bool:
        found = self._walk(paths[0])
        if found is None:
            return False
        parent, name = found
        changed = False
        inode = parent.names.get(name) if name else self.top
        if inode is None:
            inode = Inode(False)
            parent.link(name, inode)
            changed = True
        if "O_TRUNC" in call.arguments and inode.data:
            inode.data, changed = b"", True
        at = len(inode.data) if "O_APPEND" in call.arguments else 0
        self._open[(call.pid, call.result)] = (inode, at)
        return changed

    _open_ = _openat

    def _write(self, call: Call, paths: list[bytes]) -> bool:
        key = (call.pid, int(call.arguments.split(",")[0]))
        if key not in self._open:
            return False
        inode, at = self._open[key]
        data = paths[0][: call.result]
        inode.data = inode.data[:at].ljust(at, b"\0") + data + inode.data[at + len(data) :]
        self._open[key] = (inode, at + len(data))
        return True

    def _fsync(self, call: Call, paths: list[bytes]) -> bool:
        key = (call.pid, int(call.arguments.split(",")[0]))
        if key not in self._open:
            return False
        self._open[key][0].sync()
        return True

    _fdatasync = _fsync

    def _mkdir(self, call: Call, paths: list[bytes]) -> bool:
        found = self._walk(paths[0])
        if found is None:
            return False
        found[0].link(found[1], Inode(True))
        return True

    _mkdirat = _mkdir

    def _rename(self, call: Call, paths: list[bytes]) -> bool:
        source, target = self._walk(paths[0]), self._walk(paths[1])
        if source is None or target is None:
            return False
        inode = source[0].names[source[1]]
        target[0].link(target[1], inode)
        source[0].link(source[1], None)
        return True

    _renameat = _renameat2 = _rename

    def _unlink(self, call: Call, paths: list[bytes]) -> bool:
        found = self._walk(paths[0])
        if found is None:
            return False
        found[0].link(found[1], None)
        return True

    _rmdir = _unlink

    def _unlinkat(self, call: Call, paths: list[bytes]) -> bool:
        """rmtree removes relative to an open directory."""
        first = call.arguments.split(",")[0]
        if paths[0].startswith(b"/") or not first.isdigit():
            return self._unlink(call, paths)
        held = self._open.get((call.pid, int(first)))
        if held is None:
            return False
        held[0].link(os.fsdecode(paths[0]), None)
        return True

    def after_power_loss(self, where: Path, keep: Keep) -> None:
        """Write what ``keep`` leaves of the disk into the empty directory ``where``."""
        self._write_out(self.top, where, keep, set())

    def _write_out(self, inode: Inode, where: Path, keep: Keep, seen: set[int]) -> None:
        if not inode.is_dir:
            where.write_bytes(keep.data(inode))
            return
        if id(inode) in seen:
            return
        where.mkdir(exist_ok=True)
        for name, child in keep.names(inode).items():
            self._write_out(child, where / name, keep, seen | {id(inode)})


class Keep:
    """What a power loss leaves of what was not fsynced: here, nothing."""

    def names(self, inode: Inode) -> dict[str, Inode]:
        return inode.safe_names

    def data(self, inode: Inode) -> bytes:
        return inode.safe_data


class KeepNames(Keep):
    """All names, and only the bytes that were fsynced: files end too early, or are empty."""

    def names(self, inode: Inode) -> dict[str, Inode]:
        return inode.names


class KeepZeros(KeepNames):
    """All names and all lengths, with zeros for the bytes that were not fsynced."""

    def data(self, inode: Inode) -> bytes:
        return inode.safe_data.ljust(len(inode.data), b"\0")[: len(inode.data)]


class KeepAll(KeepNames):
    """Everything: a process that was killed, on a machine that goes on."""

    def data(self, inode: Inode) -> bytes:
        return inode.data


class KeepSome(Keep):
    """A random part: each directory keeps a beginning of its changes, each file a beginning of its bytes."""

    def __init__(self, random: object) -> None:
        self._random = random

    def names(self, inode: Inode) -> dict[str, Inode]:
        out = dict(inode.safe_names)
        for name, child in inode.unsafe[: self._random.randint(0, len(inode.unsafe))]:  # type: ignore[attr-defined]
            if child is None:
                out.pop(name, None)
            else:
                out[name] = child
        return out

    def data(self, inode: Inode) -> bytes:
        if inode.data == inode.safe_data:
            return inode.data
        return inode.data[: self._random.randint(0, len(inode.data))]  # type: ignore[attr-defined]
