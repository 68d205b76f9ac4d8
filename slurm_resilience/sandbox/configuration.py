"""The text of every configuration file of a sandbox.  Pure: values in, text out; the golden files are its tests.

Settings of the user win over the sandbox's own, key by key.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_resilience.errors import ConfigError
from slurm_resilience.sandbox.keys import canonical
from slurm_resilience.sandbox.layout import CONTROL, Layout, address, node_names

CPUS_PER_NODE = 8
MEMORY_MB_PER_NODE = 4000
GPUS_PER_NODE = 4


@dataclass(frozen=True)
class Cluster:
    """What a sandbox is asked to be.  ``settings`` has slurm.conf's own spelling; see :func:`settings_from`."""

    nodes: int = 4
    accounting: bool = True
    private_tmp: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return node_names(self.nodes)


def settings_from(values: Mapping[str, object]) -> dict[str, str]:
    """Settings in slurm.conf's spelling.  Raises :class:`ConfigError` for a key or a value that cannot be one."""
    out: dict[str, str] = {}
    for key, value in values.items():
        text = str(value)
        if "\n" in text or "\r" in text or not text.strip():
            raise ConfigError(f"{key}={text!r} cannot stand in slurm.conf", evidence="a value is one non-empty line")
        out[canonical(key)] = text.strip()
    return dict(sorted(out.items()))


def slurm_conf(layout: Layout, cluster: Cluster) -> str:
    """slurm.conf."""
    values: dict[str, str] = {
        "ClusterName": layout.name,
        "SlurmctldHost": f"{CONTROL}({address(CONTROL)})",
        "SlurmUser": "slurm",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "StateSaveLocation": str(layout.controller_state),
        "SlurmctldPidFile": str(layout.controller_state / "slurmctld.pid"),
        "SlurmctldLogFile": str(layout.log_of("slurmctld")),
        "SlurmdSpoolDir": str(layout.spool / "%n"),
        "SlurmdPidFile": str(layout.spool / "%n.pid"),
        "SlurmdLogFile": str(layout.log_of("slurmd.%n")),
        "SlurmdParameters": "config_overrides",  # so that 8 CPUs a node exist on two real ones
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "GresTypes": "gpu",
        "SchedulerType": "sched/backfill",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": "1",
        "ReturnToService": "2",
        "SlurmdTimeout": "300",
        "KillWait": "10",
        "Prolog": str(layout.etc / "prolog"),
        "Epilog": str(layout.etc / "epilog"),
        "JobAcctGatherType": "jobacct_gather/linux",
    }
    if cluster.accounting:
        values |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": CONTROL,
            "AccountingStoragePass": str(layout.munge_socket),  # not AuthInfo.  Source: slurm.conf(5)
        }
    values |= {key: value for key, value in cluster.settings.items() if "." not in key}
    for key, value in cluster.settings.items():
        if key.startswith("AuthInfo."):
            values["AuthInfo"] += f",{key.removeprefix('AuthInfo.')}={value}"
    lines = ["# Written by `slurm-resilience sandbox`; change it with --set KEY=VALUE."]
    lines += [f"{key}={value}" for key, value in values.items()]
    lines += [
        f"NodeName={name} NodeAddr={address(name)} CPUs={CPUS_PER_NODE} RealMemory={MEMORY_MB_PER_NODE} "
        f"Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
        for name in cluster.names
    ]
    preempt_mode = values["PreemptMode"].upper().replace(",GANG", "").replace("GANG,", "")
    low = {"Default": "YES", "PriorityTier": "1", "PreemptMode": preempt_mode, "GraceTime": "15"}
    high = {"PriorityTier": "10", "PreemptMode": "OFF"}
    lines += [_partition("low", low, cluster.settings), _partition("high", high, cluster.settings)]
    return "\n".join(lines) + "\n"


def _partition(name: str, own: dict[str, str], settings: Mapping[str, str]) -> str:
    values = {"Nodes": "ALL", "MaxTime": "INFINITE", "State": "UP"} | own
    values |= {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{name}.")}
    return f"PartitionName={name} " + " ".join(f"{key}={value}" for key, value in values.items())


def gres_conf(layout: Layout) -> str:
    """gres.conf: the GPUs are pretended, their scheduling and CUDA_VISIBLE_DEVICES are real."""
    return f"Name=gpu File={layout.devices}/gpu[0-{GPUS_PER_NODE - 1}]\n"


def slurmdbd_conf(layout: Layout, password: str) -> str:
    """slurmdbd.conf; slurmdbd refuses to start unless only SlurmUser can read it."""
    values = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "DbdHost": CONTROL,
        "DbdAddr": address(CONTROL),
        "SlurmUser": "slurm",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": "3306",
        "StorageUser": "slurm",
        "StoragePass": password,
        "StorageLoc": "slurm_acct_db",
        "LogFile": str(layout.log_of("slurmdbd")),
        "PidFile": str(layout.controller_state / "slurmdbd.pid"),
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def database_sql(password: str) -> str:
    """What MariaDB runs before it accepts its first connection.  Source: mariadbd --init-file, one statement a line."""
    return (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        f"CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
    )


def hook_script(layout: Layout, kind: str) -> str:
    """Prolog or Epilog: fails on demand, else runs what is in its folder, in order, and ends as the first that fails."""
    flag = shlex.quote(str(layout.flags / f"fail-{kind}"))
    hooks = shlex.quote(str(layout.hooks / f"{kind}.d"))
    return f"""#!/bin/sh
# Written by `slurm-resilience sandbox`.  Slurm runs it as root on each node of a job.
if [ -e {flag}."$SLURMD_NODENAME" ]; then
    echo "sandbox: fail-{kind} $SLURMD_NODENAME" >&2
    exit 1
fi
for hook in {hooks}/*; do
    if [ -x "$hook" ]; then "$hook" || exit; fi
done
exit 0
"""


def wrapper_script(how: str) -> str:
    """What `break-scontrol` puts in the place of a Slurm command."""
    scripts = {
        "hang": "#!/bin/sh\nexec sleep infinity\n",
        "fail": "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n",
        "missing": "#!/nonexistent/interpreter\n",  # execve gives ENOENT, just as for a file that is not there
    }
    return scripts[how]
