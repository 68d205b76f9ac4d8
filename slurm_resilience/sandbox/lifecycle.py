"""Building a sandbox and taking it away, also what a crash left of one.  Called with the lock held."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from slurm_resilience._clock import boot_id
from slurm_resilience.errors import SandboxError, SandboxMisuse
from slurm_resilience.sandbox import configuration, disks, freezer, network, node, packages, processes, services
from slurm_resilience.sandbox.configuration import Cluster
from slurm_resilience.sandbox.layout import CONTROL, LOGIN, Layout, hosts_text
from slurm_resilience.sandbox.node import put
from slurm_resilience.sandbox.state import State, load

_OPEN = 0o755
USER = "alice"  # whoever submits; made when missing, since nobody should rehearse as root


def why_not(*, accounting: bool = True) -> str | None:
    """Why no sandbox can run on this machine, in one phrase; None when it can."""
    if not sys.platform.startswith("linux"):
        return "not Linux"
    if os.geteuid() != 0:
        return f"not root (uid {os.geteuid()})"
    lacking = packages.missing(accounting=accounting)
    if lacking and packages.find("apt-get") is None:
        return f"no apt-get to install {', '.join(lacking)}"
    probe = [packages.find("unshare") or "unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"]
    try:
        result = subprocess.run(probe, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"cannot probe for namespaces: {error}"
    return f"no namespaces: {' '.join(result.stderr.split())}" if result.returncode != 0 else None


def require_root() -> None:
    """Raises :class:`SandboxError` unless this process may make namespaces for real."""
    if os.geteuid() != 0:
        raise SandboxMisuse(
            "The sandbox needs root",
            evidence=f"this process runs as uid {os.geteuid()}",
            remedy="use sudo; jobs in it still run as an ordinary user. Without root, `run --local N` rehearses without Slurm",
        )


def ensure_user(name: str = USER) -> None:
    """The ordinary user exists."""
    try:
        pwd.getpwnam(name)
        return
    except KeyError:
        pass
    command = [packages.path_of("useradd"), "--create-home", "--shell", "/bin/bash", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SandboxError(
            f"The user {name} cannot be made", evidence=result.stderr.strip(), remedy=f"make it: {' '.join(command)}"
        )


def build(layout: Layout, cluster: Cluster) -> State:
    """A new, running sandbox.  On any failure, also Ctrl-C, all of it is taken away again but for the logs."""
    state = State(name=layout.name, cluster=cluster, created_at=time.time(), machine_boot=boot_id())
    try:
        _prepare(layout, cluster)
        state.save(layout)
        hosts = [CONTROL, LOGIN, *cluster.names]
        network.create(layout, hosts)
        for host in (CONTROL, LOGIN):
            state.hosts[host] = node.boot(layout, host, private_tmp=False)
            state.save(layout)
        services.start_missing(layout, state.hosts[CONTROL], accounting=cluster.accounting)
        for host in cluster.names:
            state.hosts[host] = node.boot(layout, host, private_tmp=cluster.private_tmp)
            state.save(layout)
        state.phase = "up"
        state.save(layout)
    except BaseException:
        tear_down(layout)
        raise
    return state


def _prepare(layout: Layout, cluster: Cluster) -> None:
    shutil.rmtree(layout.dir, ignore_errors=True)
    layout.dir.mkdir(parents=True, mode=0o755)
    for folder in (layout.root.parent, layout.root, layout.dir):
        os.chmod(folder, _OPEN)  # whatever the umask: munge, MariaDB and the users must get in
    hook_folders = [layout.hooks / "prolog.d", layout.hooks / "epilog.d"]
    for folder in (layout.etc, layout.flags, layout.boots, layout.devices, layout.spool, layout.wrappers, *hook_folders):
        folder.mkdir(parents=True)
        os.chmod(folder, _OPEN)
    for folder in (layout.log, layout.controller_state):
        folder.mkdir()
        os.chmod(folder, _OPEN)
        shutil.chown(folder, "slurm", "slurm")
    for name in cluster.names:
        (layout.spool / name).mkdir(mode=0o755)
    for index in range(configuration.GPUS_PER_NODE):
        _pretend_device(layout.devices / f"gpu{index}")
    put(layout.hosts_file, hosts_text(cluster.names))
    put(layout.resolv_conf, "# nobody answers here; names are in /etc/hosts\n")
    write_configuration(layout, cluster)
    services.prepare_munge(layout)
    if cluster.accounting:
        services.prepare_database(layout)


def write_configuration(layout: Layout, cluster: Cluster) -> None:
    """The files that depend on settings."""
    put(layout.slurm_conf, configuration.slurm_conf(layout, cluster))
    put(layout.etc / "gres.conf", configuration.gres_conf(layout))
    for kind in ("prolog", "epilog"):
        put(layout.etc / kind, configuration.hook_script(layout, kind), mode=0o755)


def _pretend_device(path: Path) -> None:
    """Something like /dev/null that Slurm takes for a GPU; a plain file where device nodes are forbidden."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        path.touch()
    os.chmod(path, 0o666)  # noqa: S103  as /dev/null


def tear_down(layout: Layout) -> bool:
    """Nothing of the sandbox is left but its logs; False when there was nothing.  Needs no state file.

    Works from what the kernel knows (tagged processes, network namespaces, cgroups, mounts), so that a half-started
    or half-killed sandbox goes too, and kills nothing that does not carry this sandbox's tag.
    """
    leftovers = processes.tagged(node.TAG, layout.name)
    existed = bool(leftovers) or layout.state_file.exists() or bool(network.present(layout))
    processes.kill_and_wait(leftovers)
    network.remove(layout)
    freezer.remove(layout)
    disks.remove_all(layout)
    if layout.dir.is_dir():
        for entry in layout.dir.iterdir():
            if entry == layout.log:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return existed


def intact(layout: Layout, state: State) -> bool:
    """Everything that the state file says is on is on: no crash, no reboot came in between."""
    if state.phase != "up" or state.machine_boot != boot_id() or not network.present(layout):
        return False
    return all(host.init.alive() for host in state.hosts.values() if host.power)


def existing(layout: Layout) -> State:
    """The state of a sandbox that is up.  Raises :class:`SandboxError` when it is not."""
    state = load(layout) if layout.state_file.exists() else None
    if state is None or state.phase != "up":
        raise SandboxMisuse(
            f"The sandbox {layout.name} is not up",
            evidence=f"{layout.state_file} is not there" if state is None else f"{layout.state_file} says {state.phase!r}",
            remedy=f"slurm-resilience sandbox up --name {layout.name}",
        )  # fmt: skip
    dead = [name for name in (CONTROL, LOGIN) if not state.hosts[name].init.alive()]
    if dead or state.machine_boot != boot_id():
        raise SandboxError(
            f"The sandbox {layout.name} was killed",
            evidence=f"the init of {' and '.join(dead)} is gone" if dead else "the machine was restarted since",
            remedy=f"slurm-resilience sandbox up --name {layout.name} starts a new one",
        )
    return state
