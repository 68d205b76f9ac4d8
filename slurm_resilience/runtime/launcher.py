"""The process that has imported everything already: it forks ranks in milliseconds, where a new interpreter takes seconds.

Started by an agent, by file path, in the interpreter of the user's command (standard library only; see :mod:`rank_process`).
File descriptor 0 is a socket to the agent; JSON lines go both ways.  It never starts a thread, initialises no accelerator,
and refuses to fork once a preloaded module did either.  Three forms::

    launcher.py serve      preload, then fork ranks and stores on request
    launcher.py rank       be one rank, cold: the request is on file descriptor 0
    launcher.py store N    host c10d's store on listening socket N, cold

It dies with its agent, and everything that it forked dies with it.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__" and not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    # The interpreter has put this folder (its real path) first.  Before anything else is imported: neither the standard
    # library nor the user must find our modules (agent, warnings …) in place of theirs.
    del sys.path[0]

# ruff: noqa: E402
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import select
import signal
import socket
import time
from types import ModuleType
from typing import Any

_FLAGGED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Variables that an interpreter or a library reads once, at its start: a rank that wants another value cannot be forked.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_TUNABLES")


def _load(name: str) -> ModuleType:
    """A module from the file beside this one, under a name that is in nobody's way."""
    spec = importlib.util.spec_from_file_location(f"_resilience_{name}", os.path.join(_HERE, f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}.py is not beside launcher.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_forkable, _store_host = _load("forkable"), _load("store_host")


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with(parent: int) -> None:
    """SIGKILL when the parent ends, and at once if it is gone already.  Source: prctl(2), PR_SET_PDEATHSIG."""
    _prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Launcher:
    """One launcher: its channel to the agent, what it has preloaded, and the children that it waits for."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = b""
        self._fds: list[int] = []
        self._children: dict[int, dict[str, Any]] = {}  # pidfd -> {"pid", "what", "attempt", "rank"}
        self._start_environment = dict(os.environ)
        self._preloaded: dict[str, tuple[int, int]] = {}  # own sources of the user -> (mtime_ns, size)
        self._unsafe = ""

    # --- talking ------------------------------------------------------------------------------------------------------

    def _send(self, **message: Any) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)  # the agent is gone, and so are we

    def _receive(self) -> list[dict[str, Any]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, 1 << 20, 4)
        except OSError:
            os._exit(0)
        if not data:
            os._exit(0)
        self._fds += fds
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def introduce(self) -> None:
        """Say which process this is: a wrapper may stand between it and the agent."""
        self._send(m="pid", pid=os.getpid())

    # --- preloading ---------------------------------------------------------------------------------------------------

    def preload(self, named: list[str], learned: list[str]) -> None:
        """Import what the user named and what the last ranks imported, make c10d ready, and say whether forking is safe.

        A module that cannot be imported is skipped and reported.  Of the learned ones only the standard library and
        installed packages are taken, never the user's own files, which may be edited between two attempts.
        """
        began = time.monotonic()
        skipped: list[str] = []
        culprit = ""
        for name in [*named, *(name for name in learned if _forkable.is_installed(name))]:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 -- a module may raise anything, SystemExit included
                if name in named:
                    skipped.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            self._unsafe = _forkable.why_not_fork()
            if self._unsafe:
                culprit = name
                self._unsafe = f"importing {name} {self._unsafe}"
                break
        if not self._unsafe:
            _forkable.quiet_c10d()
            self._unsafe = _forkable.why_not_fork()
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and not _forkable.is_library(path) and not path.startswith(_HERE):
                with contextlib.suppress(OSError):  # made-up files, such as torch.ops' "_ops.py"
                    stat = os.stat(path)
                    self._preloaded[path] = (stat.st_mtime_ns, stat.st_size)
        gc.collect()
        gc.freeze()
        self._send(
            m="warm",
            warm=not self._unsafe,
            reason=self._unsafe,
            culprit=culprit if culprit not in named else "",
            seconds=round(time.monotonic() - began, 3),
            skipped=skipped,
            modules=len(sys.modules),
        )

    def _why_cold(self, environment: dict[str, str]) -> str:
        """Why this rank cannot be forked from here, "" when it can."""
        if self._unsafe:
            return self._unsafe
        for name in sorted({*environment, *self._start_environment}):
            if name.startswith(_READ_AT_START) and environment.get(name) != self._start_environment.get(name):
                return f"{name} is read once, at the start of a process, and this rank wants another value"
        for path, (mtime_ns, size) in self._preloaded.items():
            try:
                stat = os.stat(path)
            except OSError:
                return f"{path} is gone since it was preloaded"
            if (stat.st_mtime_ns, stat.st_size) != (mtime_ns, size):
                return f"{path} was edited since it was preloaded"
        why: str = _forkable.why_not_fork()
        return why

    # --- serving ------------------------------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any]:
        """Serve the agent; returns only in a forked rank, with what it is to run."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd in self._children:
                    poll.unregister(fd)
                    self._bury(fd)
                    continue
                for message in self._receive():
                    kind = message["m"]
                    if kind == "preload":
                        self.preload(message["named"], message["learned"])
                    elif kind == "fork":
                        if self._fork_rank(message):
                            return message
                        self._watch(poll)
                    elif kind == "store":
                        self._fork_store(message["attempt"])
                        self._watch(poll)
                    elif kind == "renew":
                        if self._fork_launcher(message):
                            return self.serve()  # another process with another channel; what is left here is not for it
                    elif kind == "end":
                        os._exit(0)

    def _watch(self, poll: select.poll) -> None:
        for fd in self._children:
            poll.register(fd, select.POLLIN)

    def _bury(self, fd: int) -> None:
        child = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(child["pid"], 0)
        self._send(m="ended", status=status, **child)

    def _adopt(self, pid: int, **what: Any) -> None:
        self._children[os.pidfd_open(pid)] = {"pid": pid, **what}

    def _forget_all(self) -> None:
        """In a new child: let go of what belongs to the launcher."""
        for fd in self._children:
            os.close(fd)
        for fd in self._fds:
            os.close(fd)
        self._children, self._fds, self._buffer = {}, [], b""
        self._channel.close()

    def _fork_rank(self, request: dict[str, Any]) -> bool:
        """True in the new rank."""
        why = self._why_cold(request["env"])
        if why:
            self._send(m="cold", attempt=request["attempt"], rank=request["rank"], why=why)
            return False
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _die_with(parent)
            self._forget_all()
            return True
        self._adopt(pid, what="rank", attempt=request["attempt"], rank=request["rank"])
        self._send(m="forked", attempt=request["attempt"], rank=request["rank"], pid=pid)
        return False

    def _fork_store(self, attempt: int) -> None:
        """Fork the store's host; it listens before anybody is told to dial, since c10d backs off for 0.5 s otherwise."""
        if self._unsafe or "torch.distributed" not in sys.modules:
            self._send(m="cold", attempt=attempt, rank=-1, why=self._unsafe or "torch is not preloaded")
            return
        listener = _store_host.listen()
        port = listener.getsockname()[1]
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                _die_with(parent)
                self._forget_all()
                os.setsid()
                _prctl(15, b"sr-store")
                _store_host.serve(listener.fileno())
            except BaseException as error:  # noqa: BLE001 -- nothing may reach the launcher's loop in this child
                os.write(2, f"the store of attempt {attempt} failed: {error!r}\n".encode())
            finally:
                os._exit(1)
        listener.close()
        self._adopt(pid, what="store", attempt=attempt, rank=-1)
        self._send(m="store_ready", attempt=attempt, port=port, pid=pid)

    def _fork_launcher(self, request: dict[str, Any]) -> bool:
        """Fork the next launcher, which goes on to preload more while this one keeps its ranks.  True in the new one.

        It is forked twice so that the agent, the nearest subreaper, becomes its parent.
        """
        if not self._fds:
            return False
        channel = self._fds.pop()
        middle = os.fork()
        if middle:
            os.close(channel)
            os.waitpid(middle, 0)
            return False
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == middle:
            time.sleep(0.001)
        _die_with(request["agent"])
        self._forget_all()
        self._channel = socket.socket(fileno=channel)
        self.introduce()
        self.preload(request["named"], request["learned"])
        return True


def _serve() -> dict[str, Any]:
    parent = int(sys.argv[2])
    if os.getppid() == parent:  # otherwise a wrapper stands between us; then the end of the channel is the sign
        _die_with(parent)
    for sig in (*_FLAGGED, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    _prctl(15, b"sr-launcher")
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    launcher = Launcher(channel)
    launcher.introduce()
    return launcher.serve()


def _read_request() -> dict[str, Any]:
    raw = b""
    while data := os.read(0, 1 << 16):
        raw += data
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    request: dict[str, Any] = json.loads(raw)
    return request


if __name__ == "__main__":
    if sys.argv[1] == "store":
        _store_host.serve(int(sys.argv[2]), int(sys.argv[3]))
    _rank, _main_module = _load("rank_process"), _load("main_module")
    if sys.argv[1] == "serve":
        _rank.run(_main_module, _serve(), forked=True)
    elif sys.argv[1] == "rank":
        _rank.run(_main_module, _read_request(), forked=False)
