"""Does Slurm requeue this job when it preempts it, and how long is its grace?  Cluster, partition and QOS decide together.

Source: slurm.conf(5), PreemptType and PreemptMode; sacctmgr(1), QOS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.client import SlurmClient

_INHERIT = frozenset({"", "CLUSTER", "(NULL)", "NONE", "UNSET"})
_BESIDE = frozenset({"GANG", "WITHIN", "PRIORITY"})


def effective_preemption(
    config: Mapping[str, str], partition: Mapping[str, str], qos: Callable[[], Mapping[str, str]]
) -> dict[str, str]:
    """``PreemptMode`` and ``GraceTime`` that count for a job, by Slurm's names; what is not known is left out.

    ``qos`` is only asked where PreemptType says that it counts; without an answer, or with one that inherits, partition and
    cluster do.
    """
    by_qos = config.get("PreemptType", "").endswith("qos")
    own = qos() if by_qos else {}
    grace = own.get("GraceTime") if _seconds(own.get("GraceTime")) else partition.get("GraceTime")
    modes = (own.get("PreemptMode"), None if by_qos else partition.get("PreemptMode"), config.get("PreemptMode"))
    mode = next((word for word in map(_mode, modes) if word), "")
    out = {"PreemptMode": mode, "GraceTime": str(_seconds(grace)) if grace is not None else ""}
    return {name: value for name, value in out.items() if value}


def ask_preemption(client: SlurmClient, partition: str, qos: str, config: Mapping[str, str] | None = None) -> dict[str, str]:
    """:func:`effective_preemption` of a job in ``partition`` with ``qos``.  Raises :class:`SlurmError`."""

    def of_qos() -> Mapping[str, str]:
        try:
            return client.qos(qos)
        except SlurmError:  # no accounting, or it does not answer: partition and cluster are what is known
            return {}

    return effective_preemption(config or client.config(), client.partition(partition), of_qos)


def _mode(text: str | None) -> str:
    words = [word for word in (text or "").upper().split(",") if word]
    if not words or words[0] in _INHERIT:
        return ""
    return next((word for word in words if word not in _BESIDE), words[0])


def _seconds(text: str | None) -> int:
    """Of ``00:00:30`` or ``30``."""
    seconds = 0
    for part in (text or "").split(":"):
        seconds = seconds * 60 + (int(part) if part.isdigit() else 0)
    return seconds
