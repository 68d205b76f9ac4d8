"""Figures for Prometheus' textfile collector.  A file that cannot be written is recorded, and changes nothing else."""

import os
import time

from . import drain, files, ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

STATUS = {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}


def text(world: "World", told: "dict[str, dict[str, object]]", seconds: float) -> str:
    """The exposition.  Counters begin anew with each boot."""
    lines = []  # type: list[str]

    def family(name: str, kind: str, says: str, rows: "list[tuple[str, str]]") -> None:
        if rows:
            lines.extend([f"# HELP slurm_resilience_{name} {says}", f"# TYPE slurm_resilience_{name} {kind}"])
            lines.extend([f'slurm_resilience_{name}{{node="{world.node}"{label}}} {value}' for label, value in rows])

    known = sorted(told.items())
    family("check_status", "gauge", "0 ok, 1 warn, 2 fail, 3 unknown",
           [(f',check="{name}"', str(STATUS.get(str(entry.get("status")), 3))) for name, entry in known])  # fmt: skip
    family("check_duration_seconds", "gauge", "how long the check took the last time",
           [(f',check="{name}"', str(files.number(entry.get("took_s")))) for name, entry in known])  # fmt: skip
    family("check_last_run_timestamp_seconds", "gauge", "when the check was last made",
           [(f',check="{name}"', "{:.0f}".format(files.number(entry.get("at")))) for name, entry in known])  # fmt: skip
    verdicts = []
    for name, entry in known:
        seen = entry.get("seen")
        for status, count in sorted(seen.items()) if isinstance(seen, dict) else []:
            verdicts.append((f',check="{name}",status="{status}"', str(count)))
    family("check_verdicts_total", "counter", "answers of each kind since boot", verdicts)
    family("last_run_timestamp_seconds", "gauge", "the end of the last round: alarm when it is old",
           [("", f"{time.time():.0f}")])  # fmt: skip
    family("run_duration_seconds", "gauge", "how long the round took", [("", f"{seconds:.3f}")])
    family("drained_by_us", "gauge", "1 while our drain stands", [("", "1" if drain.own(world) else "0")])
    family("verdict_pending", "gauge", "1 while a verdict waits for slurmctld", [("", "1" if drain.pending(world) else "0")])
    decisions = files.read_json(world.path(drain.DECISIONS))
    family("drain_decisions_total", "counter", "what became of the wish to drain this node",
           [(f',decision="{kind}"', str(count)) for kind, count in sorted(decisions.items())])  # fmt: skip
    last = files.read_json(world.path(drain.BUDGET))
    family("budget_nodes", "gauge", "the budget when this node last looked at all nodes",
           [(f',what="{what}"', str(last[what])) for what in ("allowed", "nodes", "out") if what in last])  # fmt: skip
    return "\n".join(lines) + "\n"


def write(world: "World", told: "dict[str, dict[str, object]]", seconds: float) -> None:
    """Replace the node's file in the collector's folder, when one is configured."""
    folder = world.text("metrics", "folder")
    if not folder:
        return
    path = os.path.join(folder, f"slurm_resilience_{world.node}.prom")
    temporary = f"{path}.{os.getpid()}"
    files.remove(temporary)  # of one that was killed, and had our number
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, text(world, told, seconds).encode())
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        ledger.record(world, "own_error", error=f"metrics: {error}")
