"""Stopping a whole host in the middle of an instruction, as a paused virtual machine is, and letting it go on.

Uses the kernel's freezer (cgroup v2), of which the frozen processes notice nothing.  Where there is none, SIGSTOP
and SIGCONT do, with two differences that a test may see: parents are told, and SIGCONT reaches handlers.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox import processes
from slurm_resilience.sandbox.layout import PREFIX, Layout
from slurm_resilience.sandbox.processes import Process


def mount_point() -> Path | None:
    """Where a writable cgroup v2 hierarchy is mounted; None where there is none.  Source: proc(5), mountinfo."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            fields = line.split()
            kind = fields[fields.index("-") + 1]
            if kind == "cgroup2" and "rw" in fields[5].split(","):
                return Path(fields[4])
    return None


def group_of(layout: Layout, host: str) -> Path | None:
    """The cgroup for a host that is about to boot, made when missing, not frozen; None where the kernel gives us none."""
    base = mount_point()
    if base is None:
        return None
    path = base / f"{PREFIX}-{layout.name}" / host
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.freeze").write_text("0", encoding="ascii")  # the host may have lost its power while it was frozen
    except OSError:
        return None
    return path


def remove(layout: Layout) -> None:
    """No cgroup of the sandbox is left; its processes are dead already."""
    base = mount_point()
    top = base / f"{PREFIX}-{layout.name}" if base else None
    if top is None or not top.is_dir():
        return
    deadline = time.monotonic() + 5
    for path in [*(child for child in top.iterdir() if child.is_dir()), top]:
        while True:
            try:
                path.rmdir()
                break
            except OSError:  # EBUSY until the last process is reaped
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def freeze(init: int, group: str | None) -> list[int]:
    """Nothing of the host runs any more.  Returns what :func:`thaw` needs: the processes that were stopped already."""
    if group:
        _write_and_wait(Path(group), "1")
        return []
    before = [pid for pid in processes.in_namespace_of(init) if processes.state(pid) == "T"]
    deadline = time.monotonic() + 5
    while running := [pid for pid in processes.in_namespace_of(init) if processes.state(pid) not in ("T", "t")]:
        for pid in running:
            _signal(pid, signal.SIGSTOP)
        if time.monotonic() > deadline:
            raise SandboxError("The node does not stop", evidence=f"5 s after SIGSTOP these processes still run: {running}")
        time.sleep(0.005)
    return before


def thaw(init: int, group: str | None, stopped_before: list[int]) -> None:
    """The host goes on; a process that was stopped on its own account stays so."""
    if group:
        _write_and_wait(Path(group), "0")
        return
    for pid in processes.in_namespace_of(init):
        if pid not in stopped_before:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    try:
        Process.of(pid).send(number)
    except OSError:
        return  # it ended meanwhile: then it neither runs nor needs to go on


def _write_and_wait(group: Path, value: str) -> None:
    (group / "cgroup.freeze").write_text(value, encoding="ascii")
    deadline = time.monotonic() + 5
    while f"frozen {value}" not in (group / "cgroup.events").read_text(encoding="ascii"):
        if time.monotonic() > deadline:
            raise SandboxError(
                f"{group.name} does not {'freeze' if value == '1' else 'thaw'}", evidence=f"{group}/cgroup.events"
            )
        time.sleep(0.005)
