"""`Sandbox`: a running cluster in the hands of a test or of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from slurm_resilience.errors import ConfigError, SandboxError, SandboxMisuse, nearest
from slurm_resilience.sandbox import configuration, lifecycle, node, packages, processes, services, state
from slurm_resilience.sandbox.configuration import Cluster
from slurm_resilience.sandbox.layout import CONTROL, LOGIN, ROOT, Layout, node_names
from slurm_resilience.sandbox.lifecycle import USER
from slurm_resilience.sandbox.records import fields, in_touch
from slurm_resilience.sandbox.state import HostState, State

_T = TypeVar("_T")
READY_WITHIN_S = 60.0


class Sandbox:
    """One sandbox that is up.  Its methods may be called from several processes at once."""

    def __init__(self, layout: Layout) -> None:
        lifecycle.require_root()
        self.layout = layout
        self.state()  # raises when it is not up

    @classmethod
    def up(
        cls,
        *,
        nodes: int = 4,
        name: str = "default",
        settings: Mapping[str, object] | None = None,
        accounting: bool = True,
        private_tmp: bool = False,
    ) -> Sandbox:
        """A running sandbox that is as asked: made, repaired, reconfigured, or left alone when it already is.

        Raises :class:`SandboxError` when one of this name runs with another number of nodes, accounting or /tmp.
        """
        layout = Layout(name)
        node_names(nodes)
        wanted = Cluster(nodes, accounting, private_tmp, configuration.settings_from(settings or {}))
        lifecycle.require_root()
        packages.ensure(accounting=accounting)
        lifecycle.ensure_user()
        with state.locked(layout):
            current = state.load(layout)
            if current is not None and lifecycle.intact(layout, current):
                _refuse_other_shape(layout, current.cluster, wanted)
                _adapt(layout, current, wanted)
            else:
                lifecycle.tear_down(layout)
                lifecycle.build(layout, wanted)
        sandbox = cls(layout)
        sandbox._wait_until_nodes_are_there()
        return sandbox

    @classmethod
    def attach(cls, name: str = "default") -> Sandbox:
        """The sandbox that is up under this name.  Raises :class:`SandboxError` when there is none."""
        return cls(Layout(name))

    @staticmethod
    def why_not() -> str | None:
        """Why no sandbox can run on this machine, in one phrase; None when it can (it may still have to install Slurm)."""
        return lifecycle.why_not()

    @staticmethod
    def names() -> list[str]:
        """The sandboxes that exist, up or half-dead."""
        if not ROOT.is_dir():
            return []
        return sorted(entry.name for entry in ROOT.iterdir() if (entry / "state.json").exists())

    @staticmethod
    def remove(name: str = "default") -> bool:
        """No process, mount or namespace of that sandbox is left; False when there was nothing."""
        lifecycle.require_root()
        layout = Layout(name)
        with state.locked(layout):
            return lifecycle.tear_down(layout)

    def down(self) -> None:
        """:meth:`remove` this one."""
        self.remove(self.layout.name)

    # --- looking ---

    def state(self) -> State:
        """What the sandbox remembers of itself, read anew."""
        return lifecycle.existing(self.layout)

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes."""
        return self.state().cluster.names

    def host(self, name: str) -> HostState:
        """One host (a node, ``ctl`` or ``login``).  Raises :class:`ConfigError` that names the nearest when there is none."""
        hosts = self.state().hosts
        if name not in hosts:
            raise ConfigError(f"The sandbox {self.layout.name} has no host {name!r}: {nearest(name, hosts)}")
        return hosts[name]

    def job(self, job_id: int | str) -> dict[str, str]:
        """What `scontrol show job` says, field by field; empty when slurmctld does not know the job (any more)."""
        result = self.slurm(["scontrol", "-o", "show", "job", str(job_id)], check=False)
        if result.returncode != 0:
            if "Invalid job id" in result.stderr:
                return {}
            raise SandboxError(f"Slurm does not answer about job {job_id}", evidence=result.stderr.strip())
        return fields(result.stdout.splitlines()[0] if result.stdout else "")

    def job_state(self, job_id: int | str) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED …; "" when slurmctld does not know the job (any more)."""
        return self.job(job_id).get("JobState", "")

    def node_state(self, name: str) -> str:
        """Slurm's words for a node: IDLE, ALLOCATED, DOWN*, IDLE+DRAIN …"""
        self.host(name)
        result = self.slurm(["scontrol", "-o", "show", "node", name])
        return fields(result.stdout).get("State", "")

    # --- doing ---

    def exec(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        root: bool = False,
        host: str = LOGIN,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,  # noqa: A002
        timeout: float | None = 120.0,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host (or another) in a login environment of the user, and wait for it.

        Raises subprocess.TimeoutExpired, after killing the command's whole session; CalledProcessError with ``check``.
        """
        line = self.exec_command(argv, user="root" if root else user, host=host, cwd=cwd, env=env, new_session=True)
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL if input is None else subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace",
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException as error:
                processes.kill_session_of_child(process.pid)
                process.kill()
                out, err = process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise subprocess.TimeoutExpired(list(argv), timeout or 0, out, err) from None
                raise
        result = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check:
            result.check_returncode()
        return result

    def exec_command(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        host: str = LOGIN,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        new_session: bool = False,
    ) -> list[str]:
        """The command line that does what :meth:`exec` does, for subprocess.Popen or os.execv of your own."""
        target = self.host(host)
        if not target.alive():
            raise SandboxMisuse(f"{host} is switched off", remedy=f"slurm-resilience sandbox fault power-on {host}")
        try:
            environment = node.login_environment(self.layout, user, env)
        except KeyError:
            raise ConfigError(f"There is no user {user!r} on this machine", remedy=f"useradd --create-home {user}") from None
        folders = [os.fspath(cwd) if cwd is not None else _here(), environment["HOME"]]
        return node.command(target, argv, user=user, environment=environment, cwd=folders, new_session=new_session)

    def slurm(
        self, argv: Sequence[str], *, check: bool = True, timeout: float = 30.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command as root on the control host, where no fault of `break-scontrol` reaches."""
        try:
            result = self.exec(argv, root=True, host=CONTROL, cwd="/", env=env, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise SandboxError(
                f"`{' '.join(argv)}` does not answer in the sandbox {self.layout.name}",
                evidence=f"it was killed after {timeout:g} s",
                remedy="see `sandbox status` for a daemon that does not run",
            ) from None
        if check and result.returncode != 0:
            raise SandboxError(
                f"`{' '.join(argv)}` failed in the sandbox {self.layout.name}",
                evidence=f"exit code {result.returncode}: {' '.join(result.stderr.split())}",
            )
        return result

    def fault(self, name: str, *nodes: str, **options: Any) -> dict[str, Any]:
        """Make a fault happen; back when it has, with what happened.  Names and options as on the command line."""
        from slurm_resilience.sandbox import faults

        return faults.inject(self, name, list(nodes), options)

    def wait_for(self, condition: Callable[[], _T], within: float, *, what: str = "", every: float = 0.1) -> _T:
        """The first true value of ``condition``.  Raises :class:`SandboxError` with its last value after ``within`` seconds."""
        deadline = time.monotonic() + within
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"{what or 'The condition'} did not come within {within:g} s", evidence=f"last seen: {value!r}"
                )
            time.sleep(every)

    def heal(self) -> None:
        """Undo every fault: all nodes on, plugged in, running and in service; nothing broken; no job left."""
        from slurm_resilience.sandbox import faults

        faults.heal(self)

    def _wait_until_nodes_are_there(self) -> None:
        powered = [host.name for host in self.state().hosts.values() if host.power and host.name in set(self.nodes)]
        missing: list[str] = []

        def there() -> bool:
            states = self.node_states()
            missing[:] = [f"{name}: {states.get(name, 'unknown')}" for name in powered if not in_touch(states.get(name, ""))]
            return not missing

        try:
            self.wait_for(there, READY_WITHIN_S)
        except SandboxError:
            raise SandboxError(
                "Nodes of the sandbox do not come up", evidence=f"after {READY_WITHIN_S:g} s: {', '.join(missing)}",
                remedy=f"see {self.layout.log}/slurmd.*.log and slurmctld.log",
            ) from None  # fmt: skip

    def node_states(self) -> dict[str, str]:
        """Slurm's word for each node; empty when slurmctld does not answer."""
        try:
            result = self.slurm(["scontrol", "-o", "show", "nodes"], timeout=10)
        except SandboxError:
            return {}
        found = [fields(line) for line in result.stdout.splitlines()]
        return {node["NodeName"]: node["State"] for node in found if "NodeName" in node}

    def warnings(self) -> list[str]:
        """What will surprise: the user cannot run this interpreter, or this package in it."""
        program = [sys.executable, "-c", "import slurm_resilience.errors"]
        tried = self.exec(program, cwd="/", timeout=60)
        if tried.returncode == 0:
            return []
        said = " ".join(tried.stderr.split()[-12:])
        remedy = "Keep the environment and the checkout in folders that everybody can read; /root is none."
        return [f"{USER} cannot run slurm_resilience with {sys.executable} ({said}). {remedy}"]

    def status(self) -> dict[str, Any]:
        """Everything that `sandbox status --json` prints."""
        current = self.state()
        layout = self.layout
        alive = services.running(current.hosts[CONTROL])
        answers = self.node_states() if {"slurmctld", "munged"} <= set(alive) else {}
        return {
            "name": layout.name,
            "up": lifecycle.intact(layout, current) and set(_expected(current.cluster)) <= set(alive),
            "created_at": current.created_at,
            "user": USER,
            "python": sys.executable,
            "slurm_conf": str(layout.slurm_conf),
            "settings": dict(current.cluster.settings),
            "accounting": current.cluster.accounting,
            "services": {name: alive[name].pid if name in alive else None for name in _expected(current.cluster)},
            "nodes": [
                {
                    "name": host.name, "slurm": answers.get(host.name), "power": host.alive(), "cut": host.cut,
                    "frozen": host.frozen, "pid": host.pid if host.alive() else None, "boot_id": host.boot_id,
                    "booted_at": host.booted_at,
                }
                for host in (current.hosts[name] for name in current.cluster.names if name in current.hosts)
            ],
            "broken_commands": dict(current.broken_commands),
            "disks": list(current.disks),
            "logs": {path.stem: str(path) for path in sorted(layout.log.glob("*.log")) if path.stat().st_size},
        }  # fmt: skip


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it under our feet
        return "/"


def _expected(cluster: Cluster) -> Iterable[str]:
    return services.NAMES if cluster.accounting else ("munged", "slurmctld")


def _refuse_other_shape(layout: Layout, current: Cluster, wanted: Cluster) -> None:
    differing = [
        f"{name} is {getattr(current, name)}, not {getattr(wanted, name)}"
        for name in ("nodes", "accounting", "private_tmp")
        if getattr(current, name) != getattr(wanted, name)
    ]
    if differing:
        raise SandboxMisuse(
            f"The sandbox {layout.name} runs already, and differently: {'; '.join(differing)}",
            evidence=str(layout.state_file),
            remedy=f"slurm-resilience sandbox down --name {layout.name}, or take another --name",
        )


def _adapt(layout: Layout, current: State, wanted: Cluster) -> None:
    """Give a running sandbox other settings (slurmctld restarts and keeps its jobs), and start daemons that died."""
    control = current.hosts[CONTROL]
    if dict(current.cluster.settings) != dict(wanted.settings):
        lifecycle.write_configuration(layout, wanted)
        services.stop(control, "slurmctld")
        try:
            services.start_missing(layout, control, accounting=wanted.accounting)
        except SandboxError:
            lifecycle.write_configuration(layout, current.cluster)  # a refused setting must not kill what runs
            services.start_missing(layout, control, accounting=wanted.accounting)
            raise
        current.cluster = wanted
        current.save(layout)
        _reread(current)
    services.start_missing(layout, control, accounting=wanted.accounting)


def _reread(current: State) -> None:
    """Have every slurmd read slurm.conf again.  Source: slurmd(8), SIGHUP."""
    import signal

    for name in current.cluster.names:
        host = current.hosts[name]
        for pid in processes.in_namespace_of(host.pid) if host.alive() else []:
            if processes.name(pid) == "slurmd" and processes.parent(pid) == host.pid:
                processes.Process.of(pid).send(signal.SIGHUP)
