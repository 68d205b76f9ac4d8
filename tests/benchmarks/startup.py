"""What it costs to start: importing the package, `slurm-resilience --help`, and `status` of a run with a long history.

Each figure is the median wall time of whole processes, `python_s` that of an interpreter that does nothing (the floor); they
take turns, so that all of them meet the same neighbours.  `cpu` has their time on a processor (user and system),
which a busy machine stretches far less: on an idle one the wall time is about that.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

from slurm_resilience.observe.events import EventWriter

INCIDENTS, STEPS = 20, 50


def long_run(folder: Path) -> None:
    """A run of some days: twenty faults, a thousand reported steps."""
    writer = EventWriter(folder, restart=0)
    nodes = ["n1", "n2", "n3", "n4"]
    writer.write("run_started", run_id="bench", argv=["python", "train.py"])
    writer.write("allocation_started", nodes=nodes, job_id="local")
    for number in range(INCIDENTS):
        writer.attempt += 1
        writer.write("attempt_started", nodes=nodes, world=4, plan={"global_batch": 48})
        writer.write("ranks_launched", world=4)
        writer.write("resumed", step=number * STEPS, checkpoint=f"step-{number * STEPS:08d}")
        writer.write("first_step", step=number * STEPS + 1, loss=1.0)
        for step in range(2, STEPS):
            writer.write("step_reported", step=number * STEPS + step, loss=1.0, node="n1", rank=0)
        writer.write("checkpoint_committed", step=number * STEPS + STEPS, name="c", seconds=1.0, bytes=10**9)
        writer.write("fault_detected", cause="node_lost", node="n4", detail="silent")
        writer.write("attempt_stopped", cause="node_lost", node="n4", fault=True, detail="silent")
    writer.close()
    run = {"v": 1, "run_id": "bench", "argv": ["python"], "config": {"budgets": {"node_lost": 10}}}
    (folder / "run.json").write_text(json.dumps(run))


def spent(argv: list[str]) -> tuple[float, float]:
    """Seconds on the clock and seconds of a processor for one process.  Raises CalledProcessError when it fails."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=120)
    wall, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=25, help="processes for each figure")
    args = parser.parse_args()
    # As users have it: the script that pip wrote, in its own folder.
    command = shutil.which("slurm-resilience", path=str(Path(sys.executable).parent))
    ours = [command] if command else [sys.executable, "-m", "slurm_resilience"]
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        long_run(Path(folder))
        programs = {
            "python_s": [sys.executable, "-c", "pass"],
            "python_without_site_s": [sys.executable, "-S", "-c", "pass"],
            "import_s": [sys.executable, "-c", "import slurm_resilience"],
            "help_s": [*ours, "--help"],
            "status_s": [*ours, "status", folder],
            "status_json_s": [*ours, "status", folder, "--json"],
        }
        for argv in programs.values():  # byte code is written, files are in memory
            spent(argv)
        walls: dict[str, list[float]] = {name: [] for name in programs}
        cpus: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(args.repeat):
            for name, argv in programs.items():
                wall, cpu = spent(argv)
                walls[name].append(wall)
                cpus[name].append(cpu)
    figures: dict[str, float | None] = {name: record.median(values) for name, values in walls.items()}
    floor = record.median(walls["python_s"])
    record.emit(
        args,
        "startup",
        figures,
        repetitions={"processes_each": args.repeat},
        spread={name: record.spread(values) for name, values in walls.items()},
        cpu={name: record.median(values) for name, values in cpus.items()},
        ratios={f"{name.removesuffix('_s')}_over_python": record.median(walls[name]) / floor for name in programs},
    )


if __name__ == "__main__":
    main()
