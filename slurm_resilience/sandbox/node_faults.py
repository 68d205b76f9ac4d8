"""Faults of whole nodes: power, cable, freezing, draining, slurmd, Prolog and Epilog."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import SandboxError, SandboxMisuse
from slurm_resilience.sandbox import command_faults, freezer, lifecycle, network, node, packages, processes
from slurm_resilience.sandbox.processes import Process
from slurm_resilience.sandbox.records import fields, in_service, in_touch
from slurm_resilience.sandbox.state import HostState, State, locked

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox

_NODE_BACK_WITHIN_S = 60.0
_STUCK_AFTER_S = 4.0


@contextmanager
def changing(sandbox: Sandbox) -> Iterator[State]:
    """The sandbox's state, under its lock, saved afterwards, also when the fault failed half-way."""
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        try:
            yield state
        finally:
            state.save(sandbox.layout)


def _on(state: State, name: str) -> HostState:
    host = state.hosts[name]
    if not host.alive():
        raise SandboxMisuse(
            f"{name} is off", evidence=f"its init (process {host.pid}) is not there",
            remedy=f"slurm-resilience sandbox fault power-on {name}",
        )  # fmt: skip
    return host


def power_off(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """First the cable, so that the kernel's FINs and RSTs get nowhere, then everything on the node at once."""
    with changing(sandbox) as state:
        hosts = [_on(state, name) for name in names]
        for host in hosts:
            network.set_link(sandbox.layout, host.name, up=False)
        off_at = time.time()
        processes.kill_and_wait([host.init for host in hosts])
        for host in hosts:
            host.power, host.frozen, host.cut = False, False, False
    return {"off_at": off_at}


def power_on(sandbox: Sandbox, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The node boots; back when its slurmd has spoken to slurmctld.  Jobs that Slurm still sees there meet their fate."""
    same_boot = bool(options["same_boot"])
    with changing(sandbox) as state:
        for name in names:
            old = state.hosts[name]
            if old.alive():
                raise SandboxMisuse(f"{name} is on already", evidence=f"its init is process {old.pid}")
            if not same_boot and old.clock_offset_s is None:
                raise SandboxError(
                    f"{name} cannot have a new boot time",
                    evidence="this kernel has no time namespaces (Linux 5.6)",
                    remedy="use --same-boot",
                )
        on_at = _next_second()
        for name in names:
            like = state.hosts[name] if same_boot else None
            state.hosts[name] = node.boot(sandbox.layout, name, private_tmp=state.cluster.private_tmp, like=like)
            command_faults.apply_to(sandbox.layout, state, state.hosts[name])
            network.set_link(sandbox.layout, name, up=True)
    _wait_in_touch(sandbox, names, on_at)
    return {"on_at": on_at, "slurm": [sandbox.node_state(name) for name in names]}


def _next_second() -> float:
    """Slurm knows starts by the second: wait for a fresh one, so that this start cannot be taken for the last one."""
    now = time.time()
    time.sleep(1.0 - now % 1.0)
    return time.time()


def _wait_in_touch(sandbox: Sandbox, names: list[str], since: float) -> None:
    """Back when slurmctld has heard from a slurmd that started after ``since`` on each node."""
    for name in names:
        sandbox.wait_for(
            lambda name=name: _in_touch(sandbox, name, since),  # type: ignore[misc]
            _NODE_BACK_WITHIN_S,
            what=f"The registration of {name} with slurmctld",
        )


def _in_touch(sandbox: Sandbox, name: str, since: float) -> bool:
    shown = fields(sandbox.slurm(["scontrol", "-o", "show", "node", name], env={"SLURM_TIME_FORMAT": "%s"}).stdout)
    started = shown.get("SlurmdStartTime", "")
    return started.isdigit() and int(started) >= int(since) and in_touch(shown.get("State", ""))


def cut(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """No packet passes any more; everything on the node goes on."""
    with changing(sandbox) as state:
        for name in names:
            host = _on(state, name)
            if host.cut:
                raise SandboxMisuse(f"{name} is cut off already", remedy=f"slurm-resilience sandbox fault heal {name}")
            network.set_link(sandbox.layout, name, up=False)
            host.cut = True
    return {}


def heal(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """Packets pass again."""
    with changing(sandbox) as state:
        for name in names:
            host = _on(state, name)
            network.set_link(sandbox.layout, name, up=True)
            host.cut = False
    return {}


def freeze(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """Nothing on the node runs; its kernel still answers at TCP level, as a hung machine's does."""
    with changing(sandbox) as state:
        for name in names:
            host = _on(state, name)
            if host.frozen:
                raise SandboxMisuse(f"{name} is frozen already", remedy=f"slurm-resilience sandbox fault thaw {name}")
            host.stopped_before = freezer.freeze(host.pid, host.cgroup)
            host.frozen = True
    return {}


def thaw(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """The node goes on where it was."""
    with changing(sandbox) as state:
        for name in names:
            host = _on(state, name)
            if not host.frozen:
                raise SandboxMisuse(f"{name} is not frozen")
            _thaw(host)
    return {}


def _thaw(host: HostState) -> None:
    freezer.thaw(host.pid, host.cgroup, host.stopped_before)
    host.frozen, host.stopped_before = False, []


def drain(sandbox: Sandbox, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The nodes take no new job."""
    sandbox.slurm(["scontrol", "update", f"NodeName={','.join(names)}", "State=DRAIN", f"Reason={options['reason']}"])
    for name in names:
        sandbox.wait_for(lambda name=name: "DRAIN" in sandbox.node_state(name), 10, what=f"The drain of {name}")  # type: ignore[misc]
    return {}


def resume(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """The nodes take jobs again."""
    for name in names:
        _resume(sandbox, name)
    return {}


def _resume(sandbox: Sandbox, name: str) -> None:
    if not in_service(sandbox.node_state(name)):
        sandbox.slurm(["scontrol", "update", f"NodeName={name}", "State=RESUME"])
    sandbox.wait_for(lambda: in_service(sandbox.node_state(name)), _NODE_BACK_WITHIN_S, what=f"The return of {name} to service")


def _slurmds(host: HostState) -> list[Process]:
    """The slurmd of a node: its daemon, not the slurmstepd of a job."""
    return [Process.of(pid) for pid in processes.in_namespace_of(host.pid) if processes.name(pid) == "slurmd"]


def kill_slurmd(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """slurmd is gone; the processes of its jobs are not."""
    killed = []
    with changing(sandbox) as state:
        for name in names:
            victims = _slurmds(_on(state, name))
            if not victims:
                raise SandboxError(f"No slurmd runs on {name}")
            processes.kill_and_wait(victims)
            killed += [victim.pid for victim in victims]
    return {"pids": killed}


def restart_slurmd(sandbox: Sandbox, names: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """slurmd runs, and slurmctld has heard from it."""
    with changing(sandbox) as state:
        hosts = [_on(state, name) for name in names]
        for host in hosts:
            if _slurmds(host):
                raise SandboxMisuse(f"slurmd runs on {host.name} already")
        since = _next_second()
        for host in hosts:
            _start_slurmd(sandbox, host)
    _wait_in_touch(sandbox, names, since)
    return {}


def _start_slurmd(sandbox: Sandbox, host: HostState) -> None:
    argv = [packages.path_of("slurmd"), "-D", "-N", host.name, "-f", str(sandbox.layout.slurm_conf)]
    node.start_daemon(sandbox.layout, host, argv, log=f"host.{host.name}")


def fail_prolog(sandbox: Sandbox, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The next Prolog on each node fails, and each after it, until --off."""
    return _fail_hook(sandbox, "prolog", names, bool(options["off"]))


def fail_epilog(sandbox: Sandbox, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The next Epilog on each node fails, and each after it, until --off."""
    return _fail_hook(sandbox, "epilog", names, bool(options["off"]))


def _fail_hook(sandbox: Sandbox, kind: str, names: list[str], off: bool) -> dict[str, Any]:
    setting = kind.capitalize()
    if setting in sandbox.state().cluster.settings:
        raise SandboxError(
            f"{setting} was replaced with --set, so fail-{kind} reaches nothing",
            evidence=f"{setting}={sandbox.state().cluster.settings[setting]}",
            remedy=f"put your script into {sandbox.layout.hooks}/{kind}.d instead",
        )
    for name in names:
        flag = sandbox.layout.flags / f"fail-{kind}.{name}"
        if off:
            flag.unlink(missing_ok=True)
        else:
            flag.touch()
    return {"off": off} if off else {}


def switch_all_on(sandbox: Sandbox) -> list[str]:
    """Every node is on, plugged in, running, with a slurmd that slurmctld has heard of; no Prolog or Epilog fails.

    Returns the nodes that booted just now: no process of any job is left on them.
    """
    for flag in sandbox.layout.flags.iterdir():
        flag.unlink()
    with changing(sandbox) as state:
        hosts = [state.hosts[name] for name in state.cluster.names]
        for host in hosts:
            if host.alive() and host.frozen:
                _thaw(host)
            network.set_link(sandbox.layout, host.name, up=True)
            host.cut = False
        booted = [host.name for host in hosts if not host.alive()]
        without = [host for host in hosts if not host.alive() or not _slurmds(host)]
        since = _next_second() if without else 0.0
        for host in without:
            if host.alive():
                _start_slurmd(sandbox, host)
            else:
                state.hosts[host.name] = node.boot(sandbox.layout, host.name, private_tmp=state.cluster.private_tmp)
    _wait_in_touch(sandbox, [host.name for host in without], since)
    return booted


def return_all(sandbox: Sandbox, booted: list[str]) -> None:
    """Every node is idle and in service, with nothing left on it of the jobs that were there."""
    stuck_since = dict.fromkeys(booted, 0.0)  # what still completes on a fresh node completes never
    deadline = time.monotonic() + _NODE_BACK_WITHIN_S * 2
    while True:
        states = sandbox.node_states()
        if states and all(word == "IDLE" for word in states.values()):
            break
        if time.monotonic() > deadline:
            raise SandboxError("The nodes do not come back", evidence=", ".join(f"{n}: {word}" for n, word in states.items()))
        for name, word in states.items():
            _push(sandbox, name, word, stuck_since)
        time.sleep(0.1)
    _clean(sandbox)


def _push(sandbox: Sandbox, name: str, word: str, stuck_since: dict[str, float]) -> None:
    """Bring one node nearer to IDLE, as an admin would."""
    if "COMPLETING" not in word:
        stuck_since.pop(name, None)
    elif time.monotonic() - stuck_since.setdefault(name, time.monotonic()) > _STUCK_AFTER_S:
        # slurmctld asks again about a job whose node was away only after a minute or more
        sandbox.slurm(["scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=sandbox: heal"], check=False)
        stuck_since.pop(name)
    if any(bad in word for bad in ("DRAIN", "DOWN", "FAIL")) and "COMPLETING" not in word:
        sandbox.slurm(["scontrol", "update", f"NodeName={name}", "State=RESUME"], check=False)


def _clean(sandbox: Sandbox) -> None:
    """Kill what a job left on the nodes (slurmd was dead, say), and empty their /dev/shm."""
    state = sandbox.state()
    for host in (state.hosts[name] for name in state.cluster.names):
        keep = {host.pid, *(process.pid for process in _slurmds(host))}
        leftovers = []
        for pid in processes.in_namespace_of(host.pid):
            if pid not in keep and processes.name(pid) != "slurmd":
                try:
                    leftovers.append(Process.of(pid))
                except OSError:
                    continue
        processes.kill_and_wait(leftovers)
        for entry in Path(f"/proc/{host.pid}/root/dev/shm").iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
