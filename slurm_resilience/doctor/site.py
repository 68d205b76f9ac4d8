"""The settings of a cluster that decide what becomes of a job, as an ordinary user can read them.

What cannot be read is None or empty, never a default: a rule that needs it says nothing.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass, field

from slurm_resilience.errors import ConfigError, SlurmError, nearest
from slurm_resilience.slurm import child
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.records import parse_fields

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sacct")
_TIMEOUT_S = 10.0
_SDIAG_TIME = re.compile(r"sdiag output at .*\((\d+)\)")


@dataclass(frozen=True)
class Site:
    """``config``: slurm.conf's settings; ``partitions``: each one's; ``qos``: name → PreemptMode, GraceTime, Preempt, None
    where accounting does not answer.  ``skew_s``: this machine's clock minus the controller's.
    """

    config: dict[str, str]
    partitions: dict[str, dict[str, str]]
    partition: str
    qos: dict[str, dict[str, str]] | None = None
    accounting: bool = True
    skew_s: float | None = None
    missing: tuple[str, ...] = field(default=())

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor release; (0, 0) where it is not said."""
        found = re.match(r"(\d+)\.(\d+)", self.config.get("SLURM_VERSION", ""))
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def here(self) -> dict[str, str]:
        """The settings of the partition in question."""
        return self.partitions.get(self.partition, {})

    def seconds(self, name: str) -> int | None:
        """A setting such as ``30 sec``; None for one that is not there or holds no number."""
        return number(self.config.get(name))

    def parameters(self, name: str) -> dict[str, str]:
        """A list such as ``bf_interval=30,nohold_on_prolog_fail`` as name → value."""
        words = re.split(r"[,\s]+", self.config.get(name, ""))
        return {word.partition("=")[0]: word.partition("=")[2] for word in words if word}


def number(text: str | None) -> int | None:
    """The number that a setting begins with; None for none."""
    found = re.match(r"\s*(-?\d+)", text or "")
    return int(found[1]) if found else None


def look(partition: str | None = None, *, client: CommandClient | None = None) -> Site:
    """Read the cluster.  Raises SlurmError when the controller does not answer, ConfigError for an unknown partition."""
    client = client or CommandClient(timeout_s=_TIMEOUT_S)
    missing = tuple(name for name in COMMANDS if shutil.which(name) is None)
    if "scontrol" in missing:
        raise ConfigError(
            "There is no Slurm on this machine",
            evidence=f"not found on PATH: {', '.join(missing)}",
            remedy="run this on a login node of the cluster, or in the sandbox (`slurm-resilience sandbox up`)",
        )
    config = client.config()
    partitions = _partitions()
    name = partition or next((name for name, fields in partitions.items() if fields.get("Default") == "YES"), "")
    name = name or next(iter(partitions), "")
    if name not in partitions:
        raise ConfigError(f"There is no partition {name!r}", remedy=nearest(name, partitions))
    qos, accounting = _qos(config)
    return Site(config, partitions, name, qos, accounting, _skew(), missing)


def _partitions() -> dict[str, dict[str, str]]:
    answer = child.run(("scontrol", "-o", "show", "partition"), timeout_s=_TIMEOUT_S)
    if answer.code != 0:
        raise SlurmError("Slurm does not say which partitions there are", evidence=answer.evidence)
    found = (parse_fields(line) for line in answer.out.splitlines() if line.startswith("PartitionName="))
    return {fields["PartitionName"]: fields for fields in found}


def _qos(config: dict[str, str]) -> tuple[dict[str, dict[str, str]] | None, bool]:
    """The preempt modes of all QOS and whom each may preempt, and whether accounting answers at all."""
    if "slurmdbd" not in config.get("AccountingStorageType", ""):
        return None, False
    columns = ("Name", "PreemptMode", "GraceTime", "Preempt")
    try:
        answer = child.run(("sacctmgr", "-nP", "show", "qos", f"format={','.join(columns)}"), timeout_s=_TIMEOUT_S)
    except SlurmError:
        return None, False
    if answer.code != 0:
        return None, False
    rows = (line.split("|") for line in answer.out.splitlines() if line.count("|") >= len(columns) - 1)
    return {row[0]: dict(zip(columns[1:], row[1:], strict=False)) for row in rows}, True


def _skew() -> float | None:
    """Our clock minus the controller's.  Source: sdiag prints the controller's time with its answer, in whole seconds."""
    asked = time.time()
    try:
        answer = child.run(("sdiag",), timeout_s=_TIMEOUT_S)
    except SlurmError:
        return None
    found = _SDIAG_TIME.search(answer.out)
    # The middle of the question, and the middle of the second.
    return (asked + time.time()) / 2 - (int(found[1]) + 0.5) if found else None
