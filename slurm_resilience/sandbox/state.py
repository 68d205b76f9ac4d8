"""What a sandbox remembers between two commands: one JSON file, replaced whole, guarded by one lock."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from slurm_resilience._atomic import read_json, write_json_atomic
from slurm_resilience.errors import FormatError, SandboxError
from slurm_resilience.sandbox.configuration import Cluster
from slurm_resilience.sandbox.layout import Layout
from slurm_resilience.sandbox.processes import Process

VERSION = 1


@dataclass
class HostState:
    """One host.  ``pid`` and ``start`` are its init's; ``clock_offset_s`` is (monotonic, boottime) of this boot."""

    name: str
    pid: int
    start: int
    boot_id: str
    booted_at: float
    clock_offset_s: tuple[int, int] | None
    cgroup: str | None
    power: bool = True
    cut: bool = False
    frozen: bool = False
    stopped_before: list[int] = field(default_factory=list)

    @property
    def init(self) -> Process:
        return Process(self.pid, self.start)

    def alive(self) -> bool:
        return self.power and self.init.alive()


@dataclass
class State:
    """One sandbox."""

    name: str
    cluster: Cluster
    created_at: float
    machine_boot: str  # after a reboot of the machine nothing here is true any more
    phase: str = "starting"
    hosts: dict[str, HostState] = field(default_factory=dict)
    broken_commands: dict[str, str] = field(default_factory=dict)  # command -> how, for nodes that boot later
    disks: list[str] = field(default_factory=list)

    def save(self, layout: Layout) -> None:
        """Not durable against power loss on purpose: after a reboot nothing of the sandbox is left anyway."""
        write_json_atomic(layout.state_file, {"v": VERSION, **asdict(self)}, durable=False)


def load(layout: Layout) -> State | None:
    """The state of the sandbox; None when there is none."""
    try:
        raw: Any = read_json(layout.state_file)
    except ValueError as error:
        raise _foreign(layout, f"it is not JSON: {error}") from error
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.pop("v", None) != VERSION:
        raise _foreign(layout, f"it is not of version {VERSION}")
    try:
        hosts = {}
        for name, host in raw.pop("hosts").items():
            offset = host.pop("clock_offset_s")
            hosts[name] = HostState(**host, clock_offset_s=(offset[0], offset[1]) if offset else None)
        return State(**{**raw, "cluster": Cluster(**raw["cluster"])}, hosts=hosts)
    except (KeyError, TypeError) as error:
        raise _foreign(layout, str(error)) from error


def _foreign(layout: Layout, evidence: str) -> FormatError:
    return FormatError(
        f"{layout.state_file} is not what this release writes",
        evidence=evidence,
        remedy=f"slurm-resilience sandbox down --name {layout.name} removes all of that sandbox",
    )


@contextmanager
def locked(layout: Layout, *, within_s: float = 180.0) -> Iterator[None]:
    """Nobody else starts, stops or hurts this sandbox meanwhile.  The kernel drops the lock of a process that dies."""
    layout.root.mkdir(parents=True, exist_ok=True, mode=0o755)
    fd = os.open(layout.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + within_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SandboxError(
                        f"Another command works on the sandbox {layout.name}",
                        evidence=f"{layout.lock_file} has been locked for {within_s:g} s", remedy="wait for it, or end it",
                    ) from None  # fmt: skip
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
