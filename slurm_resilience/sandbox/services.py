"""The daemons of the control host: munged, MariaDB, slurmdbd, slurmctld.  Each start returns when it serves."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurm_resilience._atomic import write_atomic
from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox import configuration, node, packages, processes
from slurm_resilience.sandbox.layout import Layout
from slurm_resilience.sandbox.processes import Process
from slurm_resilience.sandbox.state import HostState

NAMES = ("munged", "mariadbd", "slurmdbd", "slurmctld")
_SLURMDBD_PORT = 6819
_SLURMCTLD_PORT = 6817
_SERVES_WITHIN_S = 60.0


def running(host: HostState) -> dict[str, Process]:
    """The daemons that live on the control host, by name.  slurmctld's helper process counts as slurmctld's child."""
    found: dict[str, Process] = {}
    for pid in processes.in_namespace_of(host.pid) if host.alive() else []:
        name = processes.name(pid)
        if name in NAMES and name not in found:
            try:
                found[name] = Process.of(pid)
            except OSError:
                continue
    return found


def start_missing(layout: Layout, host: HostState, *, accounting: bool) -> list[str]:
    """Have every daemon run, in the order in which they need each other; the names of those that were started."""
    alive = running(host)
    starts: list[tuple[str, Callable[[Layout, HostState], None]]] = [("munged", start_munge)]
    if accounting:
        starts += [("mariadbd", start_database), ("slurmdbd", start_slurmdbd)]
    starts += [("slurmctld", start_slurmctld)]
    missing = [(name, start) for name, start in starts if name not in alive]
    for _, start in missing:
        start(layout, host)
    return [name for name, _ in missing]


def prepare_munge(layout: Layout) -> None:
    """A key of the sandbox's own: a credential of another sandbox or of the machine is worth nothing here."""
    _own_folder(layout.munge, "munge", 0o755)
    write_atomic(layout.munge / "key", secrets.token_bytes(128), mode=0o400, durable=False)
    shutil.chown(layout.munge / "key", "munge", "munge")


def start_munge(layout: Layout, host: HostState) -> None:
    """munged on the sandbox's own socket."""
    layout.munge_socket.unlink(missing_ok=True)
    argv = [packages.path_of("munged"), "--foreground", f"--socket={layout.munge_socket}", f"--key-file={layout.munge}/key"]
    argv += [f"--pid-file={layout.munge}/pid", f"--seed-file={layout.munge}/seed", "--num-threads=4"]
    _start(layout, host, "munged", argv, lambda: _accepts(layout.munge_socket), user="munge")


def prepare_database(layout: Layout) -> None:
    """An empty MariaDB, and the password that only it and slurmdbd know."""
    _own_folder(layout.database, "mysql", 0o700)
    _own_folder(layout.database / "scratch", "mysql", 0o700)
    argv = [packages.path_of("mariadb-install-db"), "--no-defaults", "--user=mysql", f"--datadir={layout.database}/data"]
    # Not /tmp: each mariadbd that starts removes all temporary tables there, those of another sandbox's installation, too.
    argv += [f"--tmpdir={layout.database}/scratch", "--skip-test-db", "--auth-root-authentication-method=socket"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, env={"PATH": packages.PATH, "LC_ALL": "C.UTF-8"})
    if result.returncode != 0:
        output = (result.stdout + result.stderr).split()
        raise SandboxError("MariaDB cannot be installed into the sandbox", evidence=" ".join(output[-60:]))
    password = secrets.token_hex(16)
    _secret(layout.database / "init.sql", configuration.database_sql(password), "mysql", 0o400)
    _secret(layout.etc / "slurmdbd.conf", configuration.slurmdbd_conf(layout, password), "slurm", 0o600)


def start_database(layout: Layout, host: HostState) -> None:
    """MariaDB on the control host's loopback and a socket in its own folder; made to be fast, not to survive a power loss."""
    (layout.database / "socket").unlink(missing_ok=True)
    _own_folder(layout.database / "scratch", "mysql", 0o700)
    argv = [packages.path_of("mariadbd"), "--no-defaults", "--user=mysql", f"--datadir={layout.database}/data"]
    argv += [
        f"--tmpdir={layout.database}/scratch",
        f"--socket={layout.database}/socket",
        f"--pid-file={layout.database}/pid",
        f"--init-file={layout.database}/init.sql",
    ]
    argv += ["--bind-address=127.0.0.1", "--port=3306", "--skip-name-resolve", "--performance-schema=OFF"]
    argv += ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M", "--innodb-flush-log-at-trx-commit=0"]
    argv += ["--innodb-doublewrite=0", "--innodb-lock-wait-timeout=900", "--innodb-buffer-pool-dump-at-shutdown=OFF"]
    _start(layout, host, "mariadbd", argv, lambda: _accepts(layout.database / "socket"), user="mysql")


def start_slurmdbd(layout: Layout, host: HostState) -> None:
    """slurmdbd; slurmctld dies at its first start when it finds none."""
    _start(layout, host, "slurmdbd", [packages.path_of("slurmdbd"), "-D"], lambda: _listens(host, _SLURMDBD_PORT))


def start_slurmctld(layout: Layout, host: HostState) -> None:
    """slurmctld with the state that it saved."""
    argv = [packages.path_of("slurmctld"), "-D", "-f", str(layout.slurm_conf)]
    _start(layout, host, "slurmctld", argv, lambda: _listens(host, _SLURMCTLD_PORT))


def kill(host: HostState, name: str) -> Process:
    """Kill one daemon as a crash does; back when it is dead.  Raises :class:`SandboxError` when it does not run."""
    process = running(host).get(name)
    if process is None:
        raise SandboxError(f"{name} does not run", evidence=f"there is no such process on {host.name}")
    helpers = [pid for pid in processes.in_namespace_of(host.pid) if processes.parent(pid) == process.pid]
    processes.kill_and_wait([process, *(Process.of(pid) for pid in helpers if processes.state(pid))])
    return process


def stop(host: HostState, name: str, *, within_s: float = 15.0) -> None:
    """End one daemon as an admin does: slurmctld saves its state first, which a crash does not.  Nothing when it is dead."""
    process = running(host).get(name)
    if process is None or not process.send(signal.SIGTERM):
        return
    deadline = time.monotonic() + within_s
    while process.alive():
        if time.monotonic() > deadline:
            raise SandboxError(f"{name} does not end", evidence=f"{within_s:g} s after SIGTERM process {process.pid} lives")
        time.sleep(0.02)


def _start(
    layout: Layout, host: HostState, name: str, argv: list[str], ready: Callable[[], bool], *, user: str = "root"
) -> None:
    """Start a daemon and wait until it serves.  Raises :class:`SandboxError` with its own words when it does not."""
    log = layout.log_of(f"{name}.out")
    before = log.stat().st_size if log.exists() else 0
    process = node.start_daemon(layout, host, argv, user=user, log=f"{name}.out")
    deadline = time.monotonic() + _SERVES_WITHIN_S
    while not ready():
        if not process.alive() or time.monotonic() > deadline:
            fate = f"does not serve after {_SERVES_WITHIN_S:g} s" if process.alive() else "ended at its start"
            raise SandboxError(f"{name} {fate}", evidence=f"it said: {_complaint(log, before)}", remedy=f"see {layout.log}")
        time.sleep(0.02)


def _complaint(log: Path, offset: int) -> str:
    """What a daemon complains about in its output from ``offset`` on; its last words where it complains of nothing."""
    lines = log.read_bytes()[offset:].decode(errors="replace").strip().splitlines()
    bad = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return " | ".join((bad or lines)[-4:]) or "nothing"


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def _listens(host: HostState, port: int) -> bool:
    """Does anything on the host listen on this TCP port?  Source: proc(5), net/tcp: state 0A is LISTEN."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{host.pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        if any(line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port for line in lines):
            return True
    return False


def _own_folder(path: Path, user: str, mode: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    os.chmod(path, mode)
    shutil.chown(path, user, user)


def _secret(path: Path, text: str, user: str, mode: int) -> None:
    write_atomic(path, text, mode=mode, durable=False)
    shutil.chown(path, user, user)
