"""Can a job in this partition be preempted, and how?  Slurm decides by cluster, partition and QOS."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resilience.doctor.site import Site, number

_INHERIT = {"", "CLUSTER", "(NULL)", "NONE"}


@dataclass(frozen=True)
class Preemption:
    """``mode``: OFF, REQUEUE, CANCEL, SUSPEND or GANG; ``decided_by``: where that is set; ``grace_s``: until the end begins."""

    mode: str
    decided_by: str
    grace_s: int

    @property
    def possible(self) -> bool:
        return self.mode != "OFF"


def of(site: Site) -> list[Preemption]:
    """Each way in which a job here may be preempted; one with mode OFF where it cannot be.

    Source: slurm.conf(5) PreemptType and PreemptMode, sacctmgr(1) for QOS.
    """
    kind = site.config.get("PreemptType", "preempt/none").removeprefix("preempt/")
    cluster = _mode(site.config.get("PreemptMode", "OFF"))
    if kind in ("none", "(null)", "") or (cluster == "OFF" and kind != "qos"):
        return [Preemption("OFF", "PreemptType and PreemptMode of the cluster", 0)]
    if kind == "partition_prio":
        if not _can_lose(site):
            return [Preemption("OFF", f"no partition stands above {site.partition}", 0)]
        own = _mode(site.here.get("PreemptMode", ""))
        where = f"PreemptMode of the partition {site.partition}" if own else "PreemptMode of the cluster"
        return [Preemption(own or cluster, where, number(site.here.get("GraceTime")) or 0)]
    prey = {name for fields in (site.qos or {}).values() for name in fields.get("Preempt", "").split(",") if name}
    whole = site.config.get("PreemptMode", "")
    prey |= {
        name for name, fields in (site.qos or {}).items() if "WITHIN" in f"{whole},{fields.get('PreemptMode', '')}".upper()
    }
    ways = [
        Preemption(_mode(fields.get("PreemptMode", "")) or cluster, f"the QOS {name}", _clock(fields.get("GraceTime", "")))
        for name, fields in (site.qos or {}).items()
        if name in prey
    ]
    if site.qos and not ways:
        return [Preemption("OFF", "no QOS may preempt another one", 0)]
    return ways or [Preemption(cluster, "PreemptMode of the cluster (the QOS could not be read)", 0)]


def _mode(text: str) -> str:
    """One word; "" for one that is inherited.  GANG beside another mode only says how suspended jobs take turns."""
    words = [word for word in text.upper().split(",") if word]
    if not words or words[0] in _INHERIT:
        return ""
    plain = [word for word in words if word not in ("GANG", "WITHIN", "PRIORITY")]
    return plain[0] if plain else words[0]


def _can_lose(site: Site) -> bool:
    own = number(site.here.get("PriorityTier")) or 1
    return any(
        (number(other.get("PriorityTier")) or 1) > own for name, other in site.partitions.items() if name != site.partition
    )


def _clock(text: str) -> int:
    """Seconds of ``00:00:30`` or ``30``."""
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + (number(part) or 0)
    return seconds
