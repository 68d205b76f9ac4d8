"""From the decision to requeue until the job runs again, on an idle cluster of the sandbox with Slurm's stock settings.

    sudo python tests/benchmarks/requeue.py [--requeues 20] [--json FILE]

One job after the other, so that nothing else wakes the scheduler:

    ours    the job requeues itself by our recipe, and `slurm-resilience watch` runs on the login node
    alone   the same without anybody outside
    slurm   a plain `scontrol requeue` from inside the job; several jobs at once, since each takes two minutes

Times go from just before the first call to Slurm to the first line of the job's script in its next run; the wall clock of
one machine.  What a run does before it requeues takes 1 to 4 s, each time another, so that no tick of Slurm's is met by
design.  A requeue that has not started after 250 s is lost.
"""

from __future__ import annotations

import math
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from slurm_resilience.sandbox import Sandbox
from tests.benchmarks import record

LOST_S = 250.0

SCRIPT = """#!/bin/bash
trap '' TERM CONT USR1 USR2
echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} started $(date +%s.%N)" >> {folder}/times
exec python {folder}/program.py {folder} {mode} {runs}
"""

PROGRAM = """
import os, signal, subprocess, sys, time
for name in ("SIGTERM", "SIGCONT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
folder, mode, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
job, restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT") or 0)

def note(word):
    with open(folder + "/times", "a") as file:
        file.write(f"{job} {restart} {word} {time.time():.3f}\\n")

if restart >= runs:
    note("ended")
    sys.exit(0)
time.sleep(1.0 + 3.0 * (restart * 0.618034 % 1.0))
if mode == "slurm":
    note("asked")
    subprocess.run(["scontrol", "requeue", job], check=True)
    os._exit(75)
from slurm_resilience.runtime.requeue import requeue
from slurm_resilience.slurm.client import CommandClient
note("asked")
outcome = requeue(CommandClient(), job, restart_count=restart, nodes=(1, 2), marker="bench")
if not outcome.ok:
    note("refused")
os._exit(75)
"""


class Bench:
    """One sandbox and one folder for all series."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox, self.folder = sandbox, folder
        self.lost = 0
        (folder / "program.py").write_text(PROGRAM)

    def series(self, mode: str, *, jobs: int, runs: int) -> list[float]:
        """Seconds of ``jobs`` x ``runs`` requeues."""
        where = self.folder / mode
        where.mkdir()
        os.chown(where, *_alice())
        shutil.copy(self.folder / "program.py", where)
        script = where / "job.sh"
        script.write_text(SCRIPT.format(folder=where, mode=mode, runs=runs))
        argv = ["sbatch", "--parsable", "--requeue", "--open-mode=append", "--time=30", "--comment=resilient", "--nodes=1-2"]
        ids = [self.sandbox.exec([*argv, f"--output={where}/out", str(script)], cwd=where, check=True).stdout.strip()
               for _ in range(jobs)]  # fmt: skip
        moved_at, before = time.monotonic(), -1
        while True:
            times = _times(where / "times")
            if sum("ended" in times.get((job, runs), {}) for job in ids) == jobs:
                break
            if len(times) != before:
                moved_at, before = time.monotonic(), len(times)
            if time.monotonic() - moved_at > LOST_S:
                self.lost += sum("ended" not in times.get((job, runs), {}) for job in ids)
                break
            time.sleep(0.5)
        waits = [
            times[job, run + 1]["started"] - here["asked"]
            for (job, run), here in sorted(times.items())
            if "asked" in here and "started" in times.get((job, run + 1), {})
        ]
        print(f"{mode}: {[round(wait, 1) for wait in waits]}", file=sys.stderr, flush=True)
        return waits

    @contextmanager
    def watch(self) -> Iterator[None]:
        """`slurm-resilience watch` on the login host, as the jobs' user."""
        pid = self.folder / "watch.pid"
        argv = self.sandbox.exec_command(["bash", "-c", f"echo $$ > {pid}; exec slurm-resilience watch"], new_session=True)
        with open(self.folder / "watch.log", "w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
            try:
                self.sandbox.wait_for(pid.exists, 60, what="The watch")
                yield
            finally:
                self.sandbox.exec(["kill", "-TERM", pid.read_text().strip()])
                process.wait(timeout=60)


def _times(path: Path) -> dict[tuple[str, int], dict[str, float]]:
    out: dict[tuple[str, int], dict[str, float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        job, run, word, at = line.split()
        out.setdefault((job, int(run)), {})[word] = float(at)
    return out


def _alice() -> tuple[int, int]:
    account = pwd.getpwnam("alice")
    return account.pw_uid, account.pw_gid


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that ``share`` of all do not exceed; None for none."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--requeues", type=int, default=20, help="of ours, with and without the watch (default: 20)")
    options.add_argument("--plain", type=int, default=6, help="plain requeues of Slurm, all at once (default: 6)")
    args = options.parse_args()
    if os.geteuid() != 0:
        options.error("the sandbox is root's: use sudo")
    sandbox = Sandbox.up(nodes=4, name="bench-requeue")
    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-bench-"))
    os.chown(folder, *_alice())
    folder.chmod(0o755)
    series: dict[str, list[float]] = {}
    try:
        bench = Bench(sandbox, folder)
        version = sandbox.exec(["sinfo", "--version"], check=True).stdout.strip()
        with bench.watch():
            series["ours"] = bench.series("ours", jobs=1, runs=args.requeues)
        series["alone"] = bench.series("alone", jobs=1, runs=args.requeues)
        series["slurm"] = bench.series("slurm", jobs=args.plain, runs=1)
    finally:
        sandbox.down()
        shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, Any] = {
        "ours_p50_s": percentile(series["ours"], 0.5),
        "ours_p95_s": percentile(series["ours"], 0.95),
        "alone_p50_s": percentile(series["alone"], 0.5),
        "alone_p95_s": percentile(series["alone"], 0.95),
        "slurm_p50_s": percentile(series["slurm"], 0.5),
        "jobs_lost": bench.lost,
    }
    figures = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    record.emit(
        args,
        "requeue",
        figures,
        repetitions={name: len(values) for name, values in series.items()},
        spread={name: record.spread(values) for name, values in series.items() if values},
        slurm=version,
    )


if __name__ == "__main__":
    main()
