"""Figures for Prometheus' textfile collector.  A file that cannot be written is recorded, and changes nothing else."""

import os
import time

from . import drain, ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

STATUS = {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}


def text(world: "World", told: "dict[str, dict[str, object]]", seconds: float) -> str:
    """The exposition."""
    label = f'node="{world.node}"'
    lines = [
        "# TYPE slurm_resilience_check_status gauge",
        "# HELP slurm_resilience_check_status 0 ok, 1 warn, 2 fail, 3 unknown",
    ]
    for name, entry in sorted(told.items()):
        lines.append(
            'slurm_resilience_check_status{{{},check="{}"}} {}'.format(label, name, STATUS.get(str(entry["status"]), 3))
        )
    values = {
        "last_run_timestamp_seconds": f"{time.time():.0f}",
        "run_duration_seconds": f"{seconds:.3f}",
        "drained_by_us": "1" if drain.own(world) else "0",
        "verdict_pending": "1" if drain.pending(world) else "0",
    }
    for name, value in sorted(values.items()):
        lines += [f"# TYPE slurm_resilience_{name} gauge", f"slurm_resilience_{name}{{{label}}} {value}"]
    return "\n".join(lines) + "\n"


def write(world: "World", told: "dict[str, dict[str, object]]", seconds: float) -> None:
    """Replace the node's file in the collector's folder, when one is configured."""
    folder = world.text("metrics", "folder")
    if not folder:
        return
    path = os.path.join(folder, f"slurm_resilience_{world.node}.prom")
    temporary = f"{path}.{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, text(world, told, seconds).encode())
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        ledger.record(world, "own_error", error=f"metrics: {error}")
