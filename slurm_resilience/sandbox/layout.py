"""Where everything of one sandbox is: folders, files, names, addresses.  Pure; touches nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.errors import ConfigError

ROOT = Path("/var/lib/slurm-resilience/sandbox")
NETNS_DIR = Path("/run/netns")
PREFIX = "srs"  # of every name in /run/netns; "slurm-resilience sandbox"
CONTROL = "ctl"  # the host of slurmctld, slurmdbd, MariaDB and munged
LOGIN = "login"  # the host that `exec` and `shell` run on
SWITCH = "switch"  # the network namespace that holds the bridge; no process lives there
MAX_NODES = 200

_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")  # munge's and MariaDB's socket paths must stay under 108 bytes


@dataclass(frozen=True)
class Layout:
    """The paths and names of the sandbox called ``name``."""

    name: str
    root: Path = ROOT

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot be the name of a sandbox",
                evidence="names are part of socket paths and network namespaces: a-z, 0-9 and '-', a letter first, at most 24",
                remedy="choose another --name",
            )

    @property
    def dir(self) -> Path:
        return self.root / self.name

    @property
    def lock_file(self) -> Path:
        return self.root / f".{self.name}.lock"

    @property
    def state_file(self) -> Path:
        return self.dir / "state.json"

    @property
    def etc(self) -> Path:
        return self.dir / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def hosts_file(self) -> Path:
        return self.etc / "hosts"

    @property
    def resolv_conf(self) -> Path:
        return self.etc / "resolv.conf"

    @property
    def log(self) -> Path:
        return self.dir / "log"

    @property
    def flags(self) -> Path:
        """Faults that a script of the sandbox reads: one file per fault and node."""
        return self.dir / "flags"

    @property
    def boots(self) -> Path:
        """The boot id of each node, bound over /proc/sys/kernel/random/boot_id there."""
        return self.dir / "boots"

    @property
    def devices(self) -> Path:
        return self.dir / "dev"

    @property
    def spool(self) -> Path:
        return self.dir / "spool"

    @property
    def controller_state(self) -> Path:
        return self.dir / "slurmctld"

    @property
    def munge(self) -> Path:
        return self.dir / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def database(self) -> Path:
        return self.dir / "mariadb"

    @property
    def wrappers(self) -> Path:
        """What `break-scontrol` binds over Slurm's commands."""
        return self.dir / "wrappers"

    @property
    def hooks(self) -> Path:
        """Folders prolog.d and epilog.d: what is executable in them runs as root around each job on each node."""
        return self.dir / "hooks"

    def netns(self, host: str) -> str:
        return f"{PREFIX}-{self.name}-{host}"

    def netns_path(self, host: str) -> Path:
        return NETNS_DIR / self.netns(host)

    def log_of(self, what: str) -> Path:
        return self.log / f"{what}.log"


def node_names(count: int) -> list[str]:
    """n1 … nN."""
    if not 1 <= count <= MAX_NODES:
        raise ConfigError(f"A sandbox has 1 to {MAX_NODES} nodes, not {count}")
    return [f"n{index}" for index in range(1, count + 1)]


def address(host: str) -> str:
    """The host's address.  Every sandbox has a network stack of its own, so all use the same ones."""
    fixed = {CONTROL: "10.77.255.1", LOGIN: "10.77.255.2"}
    return fixed.get(host) or f"10.77.0.{int(host.removeprefix('n'))}"


def hosts_text(nodes: list[str]) -> str:
    """/etc/hosts of every host of the sandbox."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address(host)} {host}" for host in (CONTROL, LOGIN, *nodes)]
    return "\n".join(lines) + "\n"
