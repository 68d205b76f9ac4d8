from __future__ import annotations

import pytest

from slurm_resilience.slurm.preemption import effective_preemption
from slurm_resilience.slurm.reservations import next_maintenance, parse_reservations

# As Slurm 22.05.8 prints them, each on one line.
TEXT = """\
ReservationName=late StartTime=2026-12-02T00:00:00 EndTime=2026-12-02T04:00:00 Duration=04:00:00 Nodes=n[1-4] NodeCnt=4 CoreCnt=8 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=8 Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
ReservationName=soon StartTime=2026-12-01T00:00:00 EndTime=2026-12-01T04:00:00 Duration=04:00:00 Nodes=n3 NodeCnt=1 CoreCnt=2 Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES TRES=cpu=2 Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
ReservationName=course StartTime=2026-11-30T12:00:00 EndTime=2026-12-30T00:00:00 Duration=30-00:00:00 Nodes=n1 NodeCnt=1 CoreCnt=2 Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=2 Users=alice Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
"""  # noqa: E501
SOON = 1796083200.0


@pytest.mark.parametrize(
    ("nodes", "now", "own", "name"),
    [
        (("n1", "n3"), SOON - 100, "", "soon"),
        (("n1",), SOON - 100, "", "late"),
        (("n3",), SOON + 5 * 3600, "", "late"),  # the first is over
        (("n3",), SOON + 100, "soon", "late"),  # the job runs in it
        (("n9",), SOON, "", None),
    ],
)
def test_the_first_maintenance_on_our_nodes(nodes: tuple[str, ...], now: float, own: str, name: str | None) -> None:
    coming = next_maintenance(parse_reservations(TEXT), nodes, now=now, own=own)
    assert (coming.name if coming else None) == name


def test_none_at_all() -> None:
    assert parse_reservations("No reservations in the system\n") == []


@pytest.mark.parametrize(
    ("kind", "cluster", "partition", "qos", "mode", "grace"),
    [
        ("preempt/partition_prio", "REQUEUE", "CANCEL", "REQUEUE", "CANCEL", "15"),
        ("preempt/partition_prio", "GANG,REQUEUE", "(null)", "CANCEL", "REQUEUE", "15"),
        ("preempt/qos", "REQUEUE", "SUSPEND", "cancel", "CANCEL", "90"),
        ("preempt/qos", "REQUEUE", "CANCEL", "cluster", "REQUEUE", "90"),
        ("preempt/qos", "CANCEL", "REQUEUE", None, "CANCEL", "15"),  # accounting does not answer
        ("preempt/none", "OFF", "(null)", None, "OFF", "15"),
    ],
)
def test_cluster_partition_and_qos_decide_together(
    kind: str, cluster: str, partition: str, qos: str | None, mode: str, grace: str
) -> None:
    """MFC#1771: a QOS with PreemptMode=CANCEL ends a job for good, though the cluster's word is REQUEUE."""
    config = {"PreemptType": kind, "PreemptMode": cluster}
    own = {} if qos is None else {"PreemptMode": qos, "GraceTime": "00:01:30"}
    got = effective_preemption(config, {"PreemptMode": partition, "GraceTime": "15"}, lambda: own)
    assert got == {"PreemptMode": mode, "GraceTime": grace}
