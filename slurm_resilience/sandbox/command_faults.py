"""Faults of what programs stand on: Slurm's commands, and the space on a disk."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import ConfigError, SandboxError, SandboxMisuse, nearest
from slurm_resilience.sandbox import configuration, disks, lifecycle, node, packages
from slurm_resilience.sandbox.layout import CONTROL, Layout
from slurm_resilience.sandbox.state import HostState, State, locked

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox

_COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def break_command(sandbox: Sandbox, _targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Every start of the command on nodes and login hangs, fails, or finds no such file; the control host's is spared."""
    command, how = options["command"], options["how"]
    if command not in _COMMANDS:
        raise ConfigError(f"{command!r} is no command of Slurm's: {nearest(command, _COMMANDS)}")
    if how not in ("hang", "fail", "missing"):
        raise ConfigError(f"how={how!r}: {nearest(how, ('hang', 'fail', 'missing'))}")
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        if options["off"]:
            if command not in state.broken_commands:
                raise SandboxMisuse(
                    f"{command} is not broken", evidence=f"broken: {', '.join(state.broken_commands) or 'nothing'}"
                )
            _mend(sandbox.layout, state, command)
        else:
            if command in state.broken_commands:
                _mend(sandbox.layout, state, command)
            state.broken_commands[command] = how
            state.save(sandbox.layout)  # before the first mount, so that `heal` undoes also half of it
            for host in _hosts(state):
                _break_on(sandbox.layout, host, command, how)
        state.save(sandbox.layout)
    return {"command": command, "how": "off" if options["off"] else how}


def _hosts(state: State) -> list[HostState]:
    return [host for host in state.hosts.values() if host.name != CONTROL and host.alive()]


def _break_on(layout: Layout, host: HostState, command: str, how: str) -> None:
    wrapper = layout.wrappers / how
    if not wrapper.exists():
        node.put(wrapper, configuration.wrapper_script(how), mode=0o755)
    node.change_mounts(host, [("bind", str(wrapper), os.path.realpath(packages.path_of(command)))])


def _mend(layout: Layout, state: State, command: str) -> None:
    del state.broken_commands[command]
    state.save(layout)
    for host in _hosts(state):
        node.change_mounts(host, [("unmount", "", os.path.realpath(packages.path_of(command)))])


def apply_to(layout: Layout, state: State, host: HostState) -> None:
    """Give a host that has just booted the broken commands that the others have.  Disks it has from the machine."""
    for command, how in state.broken_commands.items():
        _break_on(layout, host, command, how)


def small_disk(sandbox: Sandbox, targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """A tmpfs of --size at PATH, the same one on every host and on this machine, owned by alice."""
    path = _path(targets)
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        if options["off"]:
            _remove_disk(sandbox.layout, state, path)
        else:
            _make_disk(sandbox.layout, state, path, options["size"])
        state.save(sandbox.layout)
    return {"path": str(path), "size": "off" if options["off"] else options["size"]}


def fill_disk(sandbox: Sandbox, targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Not a byte more than --leave fits on the small disk at PATH, until --off."""
    path = _path(targets)
    leave = 0 if options["leave"] == "0" else disks.size_bytes(options["leave"])
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        if options["off"]:
            _require_disk(state, path)
            disks.empty(path)
            return {"path": str(path), "off": True}
        if str(path) not in state.disks:
            _make_disk(sandbox.layout, state, path, options["size"])
            state.save(sandbox.layout)
        written = disks.fill(path, leave)
    return {"path": str(path), "ballast_bytes": written, "free_bytes": os.statvfs(path).f_bavail * os.statvfs(path).f_frsize}


def _path(targets: list[str]) -> Path:
    if not targets:
        raise ConfigError("Which folder? Name the PATH of the small disk")
    return Path(os.path.abspath(targets[0]))


def _require_disk(state: State, path: Path) -> None:
    if str(path) not in state.disks:
        raise SandboxError(
            f"{path} is no small disk of this sandbox", evidence=f"its disks: {', '.join(state.disks) or 'none'}"
        )


def _make_disk(layout: Layout, state: State, path: Path, size: str) -> None:
    from slurm_resilience.sandbox import kernel

    if str(path) in state.disks:
        raise SandboxMisuse(f"{path} is a small disk already")
    account = pwd.getpwnam(lifecycle.USER)
    disks.create(layout, path, disks.size_bytes(size), account.pw_uid, account.pw_gid)
    state.disks.append(str(path))
    state.save(layout)
    for host in state.hosts.values():
        if host.alive():
            fd = kernel.open_tree(str(path))
            try:
                node.change_mounts(host, [("attach", str(fd), str(path))], pass_fds=[fd])
            finally:
                os.close(fd)


def _remove_disk(layout: Layout, state: State, path: Path) -> None:
    from slurm_resilience.sandbox import kernel

    _require_disk(state, path)
    state.disks.remove(str(path))
    state.save(layout)
    for host in state.hosts.values():
        if host.alive():
            node.change_mounts(host, [("unmount", "", str(path))])
    kernel.unmount(str(path))


def heal(sandbox: Sandbox) -> None:
    """No command is broken, no disk is full (disks stay, emptied of ballast)."""
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        for command in list(state.broken_commands):
            _mend(sandbox.layout, state, command)
        for path in state.disks:
            disks.empty(Path(path))
        state.save(sandbox.layout)
