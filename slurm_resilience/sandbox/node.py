"""Hosts of the sandbox: starting one, running a command on one, changing its mounts."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import slurm_resilience
from slurm_resilience._atomic import write_atomic
from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox import freezer, packages
from slurm_resilience.sandbox.layout import CONTROL, LOGIN, Layout
from slurm_resilience.sandbox.processes import Process
from slurm_resilience.sandbox.state import HostState

TAG = "SLURM_RESILIENCE_SANDBOX"  # in the environment of every init and daemon: how a crash's leftovers are found
_PATIENCE_S = 60.0
_PACKAGE_ROOT = str(Path(slurm_resilience.__file__).resolve().parent.parent)


def _program(module: str) -> list[str]:
    """A Python that starts fast and sees the standard library and this package only."""
    code = f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); from slurm_resilience.sandbox.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


def put(path: Path, text: str, *, mode: int = 0o644) -> None:
    """A file with this mode, whatever the umask of root's shell: the sandbox's users must be able to read it."""
    write_atomic(path, text, mode=mode, durable=False)
    os.chmod(path, mode)


def boot(
    layout: Layout,
    host: str,
    *,
    private_tmp: bool,
    like: HostState | None = None,
) -> HostState:
    """Switch the host on.  Every boot has its own boot id and boot time, unless it shall be ``like`` an earlier one."""
    boot_id = like.boot_id if like else str(uuid.uuid4())
    boot_file = layout.boots / host
    put(boot_file, boot_id + "\n")
    is_node = host not in (CONTROL, LOGIN)
    offset = like.clock_offset_s if like else (_clock_offset() if is_node else None)
    group = freezer.group_of(layout, host)
    mounts: list[list[object]] = [
        ["proc", "/proc", "proc", _NO_EXECUTION],
        ["tmpfs", "/dev/shm", "tmpfs", _NO_DEVICES, "mode=1777"],  # noqa: S108
        [str(boot_file), "/proc/sys/kernel/random/boot_id", "", _BIND],
        [str(layout.hosts_file), "/etc/hosts", "", _BIND],
    ]
    if Path("/etc/resolv.conf").exists():
        mounts.append([str(layout.resolv_conf), "/etc/resolv.conf", "", _BIND])
    if is_node and private_tmp:
        mounts.append(["tmpfs", "/tmp", "tmpfs", _NO_DEVICES, "mode=1777"])  # noqa: S108
    environment = {TAG: layout.name, "PATH": packages.PATH, "SLURM_CONF": str(layout.slurm_conf), "LC_ALL": "C.UTF-8"}
    slurmd = [packages.path_of("slurmd"), "-D", "-N", host, "-f", str(layout.slurm_conf)] if is_node else None
    spec = {
        "host": host,
        "netns": str(layout.netns_path(host)),
        "clock_offset_s": offset,
        "cgroup": str(group) if group else None,
        "mounts": mounts,
        "log": str(layout.log_of(f"host.{host}")),
        "command": slurmd,
        "environment": environment,
    }
    result = _run([*_program("init"), json.dumps(spec)], f"The start of {host}", environment=environment)
    if result.returncode != 0:
        raise SandboxError(
            f"The host {host} does not start",
            evidence=result.stderr.strip(),
            remedy="namespaces of every kind are needed (Linux 5.8 or newer); a container must run with --privileged",
        )
    init = Process.of(int(result.stdout))
    return HostState(
        name=host, pid=init.pid, start=init.start, boot_id=boot_id, booted_at=like.booted_at if like else time.time(),
        clock_offset_s=offset, cgroup=str(group) if group else None,
    )  # fmt: skip


_NO_EXECUTION = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC; kernel.py loads ctypes, which this process can do without
_NO_DEVICES = 2 | 4
_BIND = 4096


def _clock_offset() -> tuple[int, int] | None:
    """Offsets that make the uptime of a host that boots now start at zero; None where the kernel has no time namespaces."""
    if not os.path.exists("/proc/self/ns/time_for_children"):
        return None
    return (-int(time.clock_gettime(time.CLOCK_MONOTONIC)), -int(time.clock_gettime(time.CLOCK_BOOTTIME)))


def command(
    host: HostState,
    argv: Sequence[str],
    *,
    user: str,
    environment: Mapping[str, str],
    cwd: Sequence[str] = (),
    detach: str | None = None,
    new_session: bool = False,
    mount_operations: Sequence[Sequence[str]] = (),
) -> list[str]:
    """The command line, for a process of the machine, that runs ``argv`` on ``host``.

    ``cwd`` lists folders, of which the first that the user can read is taken.  With ``detach`` (a log file) it is
    started in the background and its process id printed.
    """
    spec = {
        "host": host.name, "pid": host.pid, "start": host.start, "own_clock": host.clock_offset_s is not None,
        "cgroup": host.cgroup if argv else None,  # who only changes mounts must not freeze with the host
        "user": user, "environment": dict(environment), "cwd": list(cwd), "argv": list(argv),
        "detach": detach, "new_session": new_session, "mount_operations": [list(item) for item in mount_operations],
    }  # fmt: skip
    return [*_program("enter"), json.dumps(spec)]


def _run(
    line: Sequence[str], what: str, *, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            pass_fds=pass_fds,
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(f"{what} does not end", evidence=f"it was killed after {_PATIENCE_S:g} s") from None


def start_daemon(layout: Layout, host: HostState, argv: Sequence[str], *, user: str = "root", log: str) -> Process:
    """Start a daemon on the host; back when it has been executed (not: when it is ready; it may even have ended)."""
    environment = {TAG: layout.name, "PATH": packages.PATH, "SLURM_CONF": str(layout.slurm_conf), "LC_ALL": "C.UTF-8"}
    line = command(host, argv, user=user, environment=environment, detach=str(layout.log_of(log)))
    result = _run(line, f"The start of {argv[0]} on {host.name}")
    if result.returncode != 0:
        raise SandboxError(f"{argv[0]} does not start on {host.name}", evidence=result.stderr.strip())
    pid = int(result.stdout)
    try:
        return Process.of(pid)
    except OSError:  # it has ended, and been buried, already: slurmctld with a bad slurm.conf is that quick
        return Process(pid, start=-1)


def change_mounts(host: HostState, operations: Sequence[Sequence[str]], *, pass_fds: Sequence[int] = ()) -> None:
    """Do mount operations (see enter.py) in the host's own mount namespace."""
    line = command(host, [], user="root", environment={}, mount_operations=operations)
    result = _run(line, f"A change of the mounts of {host.name}", pass_fds=pass_fds)
    if result.returncode != 0:
        raise SandboxError(f"The mounts of {host.name} cannot be changed", evidence=result.stderr.strip())


def login_environment(layout: Layout, user: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a login shell of ``user`` would have, and nothing of the caller's but TERM.  Raises KeyError for no such user."""
    account = pwd.getpwnam(user)
    folders = [str(Path(sys.executable).parent)]
    folders += (packages.PATH if account.pw_uid == 0 else "/usr/local/bin:/usr/bin:/bin").split(":")
    folders += [str(Path(packages.path_of("scontrol")).parent)]
    return {
        "HOME": account.pw_dir,
        "USER": user,
        "LOGNAME": user,
        "SHELL": account.pw_shell or "/bin/sh",
        "PATH": ":".join(dict.fromkeys(folders)),
        "LANG": "C.UTF-8",
        "TERM": os.environ.get("TERM", "dumb"),
        "SLURM_CONF": str(layout.slurm_conf),
        **(extra or {}),
    }
