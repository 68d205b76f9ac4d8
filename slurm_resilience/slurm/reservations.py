"""When does a maintenance reservation begin on nodes of ours?

Slurm starts no job whose time limit reaches into one, but it lets a running one stand in it when the admin said so
(IGNORE_JOBS), and whoever maintains the nodes will not wait.  Source: scontrol(1), CREATE RESERVATION.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurm_resilience.slurm.nodeset import expand
from slurm_resilience.slurm.records import parse_fields, parse_time


@dataclass(frozen=True)
class Reservation:
    """Times are wall-clock seconds."""

    name: str
    start_at: float
    end_at: float | None
    nodes: tuple[str, ...]
    flags: frozenset[str]

    @property
    def maintenance(self) -> bool:
        return "MAINT" in self.flags


def parse_reservations(text: str) -> list[Reservation]:
    """From ``scontrol -o show reservation``; lines that are none ("No reservations in the system") are left out."""
    out = []
    for line in text.splitlines():
        fields = parse_fields(line) if line.startswith("ReservationName=") else {}
        start_at = parse_time(fields.get("StartTime"))
        if start_at is None:
            continue
        nodes = fields.get("Nodes", "")
        out.append(
            Reservation(
                fields["ReservationName"],
                start_at,
                parse_time(fields.get("EndTime")),
                expand(nodes if nodes != "(null)" else ""),
                frozenset(fields.get("Flags", "").split(",")),
            )
        )
    return out


def next_maintenance(
    reservations: Iterable[Reservation], nodes: Collection[str], *, now: float, own: str = ""
) -> Reservation | None:
    """The first maintenance that is on, or comes, on one of ``nodes``; ``own`` is the reservation that the job runs in."""
    mine = set(nodes)
    hit = [
        each
        for each in reservations
        if each.maintenance and each.name != own and mine & set(each.nodes) and (each.end_at is None or each.end_at > now)
    ]
    return min(hit, key=lambda each: each.start_at, default=None)
