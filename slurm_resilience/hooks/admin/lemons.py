"""Which nodes are suspects?  Ranks them by seven signals and says the numbers; it suggests, it drains nothing.

Signals after Kokolis et al., "Revisiting reliability in large-scale machine learning research clusters" (HPCA 2025): jobs
that exclude the node, distinct XIDs, tickets, times out of service, failed multi-node jobs, failed single-node jobs and
their rate.  Exclusions alone did not correlate there, so they count least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_resilience.hooks import files

WEIGHTS = {
    "xids": 2.0, "tickets": 2.0, "times_out": 2.0, "multi_node_failures": 1.0, "single_node_failures": 1.0,
    "single_node_failure_rate": 2.0, "excluded_by": 0.5,
}  # fmt: skip
SUSPICIOUS_USERS = 2  # one user's broken program is no evidence against a node


@dataclass
class Suspect:
    """One node's signals and its score: the weighted number of signals in which it is worse than nine of ten nodes."""

    node: str
    excluded_by: int = 0
    xids: int = 0
    tickets: int = 0
    times_out: int = 0
    multi_node_failures: int = 0
    single_node_failures: int = 0
    single_node_failure_rate: float = 0.0
    users: int = 0
    score: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def signals(node: str, entries: Iterable[Mapping[str, Any]], since: float, excluded_by: int = 0) -> Suspect:
    """The signals in one node's ledger since a time."""
    codes: set[str] = set()
    users: set[Any] = set()
    suspect = Suspect(node, excluded_by=excluded_by)
    days: set[int] = set()
    for entry in entries:
        if files.number(entry.get("at")) < since:
            continue
        what = entry.get("what")
        if what == "check" and entry.get("check") == "xid" and entry.get("word") and entry.get("blame") != "job":
            codes.add(str(entry["word"]))
        elif what == "drained":
            suspect.times_out += 1
        elif what == "ticket":
            suspect.tickets += 1
        elif what == "job_ended" and entry.get("status"):
            users.add(str(entry.get("uid")))
            days.add(int(files.number(entry.get("at")) // 86400))
            if files.integer(entry.get("nodes"), 1) > 1:
                suspect.multi_node_failures += 1
            else:
                suspect.single_node_failures += 1
    suspect.xids, suspect.users = len(codes), len(users)
    suspect.single_node_failure_rate = round(suspect.single_node_failures / len(days), 3) if days else 0.0
    return suspect


def rank(suspects: Iterable[Suspect]) -> list[Suspect]:
    """The most suspicious first.  A signal counts where the node is above nine of ten nodes and above none at all."""
    found = list(suspects)
    for name, weight in WEIGHTS.items():
        values = sorted(getattr(suspect, name) for suspect in found)
        limit = values[int(0.9 * (len(values) - 1))] if values else 0
        for suspect in found:
            value = getattr(suspect, name)
            by_one_user = name in ("multi_node_failures", "single_node_failures", "single_node_failure_rate")
            if value > 0 and value >= limit and not (by_one_user and suspect.users < SUSPICIOUS_USERS):
                suspect.score += weight
    return sorted(found, key=lambda suspect: (-suspect.score, -suspect.times_out, suspect.node))
