"""From a fault to the first resumed step: ours beside torchrun, NVRx's ft_launcher and Slurm's own requeue, in one run.

    sudo python tests/benchmarks/recovery.py [--peers torchrun,ft_launcher,slurm_requeue] [--reps 6] [--json FILE]
        [--slurm-record tests/benchmarks/records/slurm_requeue.json]

The same small training under each: 2 ranks on this machine, gloo, steps of 0.1 s, a checkpoint every 10.

    rank_kill       SIGKILL to the last rank; the script imports FSDP2 and DCP, and saves with them
    rank_kill_bare  the same, a script of bare torch
    hang            the last rank of the bare script falls asleep between two steps
    node_off        a node of the sandbox loses its power, SlurmdTimeout at its default of 300 s (needs root)

Ours runs with verification on and a probe.  Each peer has the settings that are best for it; they are in the object, as is
its version.  Time is told by marks that the ranks write, the same for all: ``started`` is the first line of the script,
``imported`` after its imports, ``joined`` in the process group, ``built`` when model and optimizer are there, ``loaded``
after the checkpoint.  Systems take turns, one job at a time, so that a noisy neighbour meets all of them.
Figures are medians of seconds; null where a system did not recover, with the reason under ``failed``.
NVRx comes from PyPI, into an environment of its own that is removed in the end.  Slurm's own requeue takes ten minutes, in five
jobs at once beside everything else; ``--slurm-record`` takes it from an earlier run, which the object then names.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks import record
from tests.benchmarks.recovery_parts import nodes, systems

RANKS = 2
KILL_WITHIN_S, HANG_WITHIN_S = 120.0, 180.0
PEERS = ("torchrun", "ft_launcher", "slurm_requeue")
# Workload: words for the script, words per system, repetitions as a share of --reps.
WORKLOADS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "rank_kill": (["--fsdp"], {}),
    "rank_kill_bare": ([], {}),
    "hang": ([], {"torchrun": ["--timeout", "10"], "ft_launcher": ["--heartbeat"]}),
}
HANG_REPS = 2


class Bench:
    """All trials of the local workloads."""

    def __init__(self, folder: Path, chosen: list[systems.System]) -> None:
        self.folder, self.chosen = folder, chosen
        self.trials: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
        self.failed: dict[str, str] = {}

    def turn(self, workload: str, number: int, repetitions: int) -> None:
        """Each system once, from a fresh start, with so many faults."""
        words, own = WORKLOADS[workload]
        turned = self.chosen[number % len(self.chosen) :] + self.chosen[: number % len(self.chosen)]
        for system in turned:
            if f"{workload}.{system.name}" in self.failed:
                continue
            where = self.folder / f"{workload}-{system.name}-{number}"
            try:
                with systems.running(system, where, [*words, *own.get(system.name, [])], RANKS) as job:
                    for repetition in range(repetitions):
                        if repetition:
                            job.wait_until_steady()
                        hurt = job.hang_rank if workload == "hang" else job.kill_rank
                        took = hurt(HANG_WITHIN_S if workload == "hang" else KILL_WITHIN_S)
                        self.trials[workload][system.name].append(took)
                        print(f"{workload} {system.name}: {_rounded(took)}", file=sys.stderr, flush=True)
            except (RuntimeError, subprocess.SubprocessError) as error:
                self.failed[f"{workload}.{system.name}"] = str(error)
                print(f"{workload} {system.name}: {error}", file=sys.stderr, flush=True)

    def run(self, workload: str, repetitions: int) -> None:
        """Two turns, so that each system's trials lie apart in time."""
        half = (repetitions + 1) // 2
        self.turn(workload, 0, half)
        if repetitions > half:
            self.turn(workload, 1, repetitions - half)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def summary(trials: dict[str, list[dict[str, float]]], names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Median totals per system, and the median of each phase beside them."""
    totals: dict[str, Any] = dict.fromkeys(names)
    phases: dict[str, Any] = {}
    for name, each in trials.items():
        if each:
            totals[name] = round(record.median([trial["first_step"] for trial in each]), 3)
            words = [word for word in each[0] if all(word in trial for trial in each)]
            phases[name] = {word: round(record.median([trial[word] for trial in each]), 3) for word in words}
            phases[name]["first_step_all"] = [round(trial["first_step"], 3) for trial in each]
    return totals, phases


def read_record(path: Path) -> dict[str, Any]:
    """Slurm's own requeue in an earlier run's object, and when that was.  Ends the program where it is none."""
    try:
        found = json.loads(path.read_text())
        trials = [float(seconds) for seconds in found["phases"]["node_off"]["slurm_requeue"]["first_step_all"]]
        return {"first_step_all": trials, "at": str(found["at"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(
            f"recovery.py: {path} is no record of this benchmark with Slurm's requeue in it: {type(error).__name__}: {error}"
        )


def ratio(totals: dict[str, Any], peers: list[str]) -> float | None:
    """The best peer's median over ours; None where either is missing."""
    theirs = [totals[peer] for peer in peers if totals.get(peer) is not None]
    return round(min(theirs) / totals["ours"], 2) if theirs and totals.get("ours") else None


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)} (default: all); '' for none")
    options.add_argument("--reps", type=int, default=6, help="faults per system and workload (default: 6)")
    options.add_argument("--workloads", default=",".join([*WORKLOADS, "node_off"]), help="default: all")
    options.add_argument("--slurm-record", metavar="FILE", help="an earlier run's object, for Slurm's own requeue")
    options.add_argument("--sandbox", default="bench-recovery", help="name of the sandbox (default: bench-recovery)")
    args = options.parse_args()
    peers = [peer for peer in args.peers.split(",") if peer]
    workloads = [word for word in args.workloads.split(",") if word]
    unknown = [*(set(peers) - set(PEERS)), *(set(workloads) - {*WORKLOADS, "node_off"})]
    if unknown:
        options.error(f"not known: {', '.join(unknown)}")
    if args.reps < 1:
        options.error("--reps must be at least 1")
    recorded = read_record(Path(args.slurm_record)) if args.slurm_record else None
    measures_slurm = "slurm_requeue" in peers and recorded is None
    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-recovery-"))
    figures: dict[str, Any] = {}
    phases: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    slurm = None
    torch = importlib.metadata.version("torch")
    chosen = [systems.ours(RANKS, importlib.metadata.version("slurm-resilience"))]
    try:
        if "torchrun" in peers:
            chosen.append(systems.torchrun(RANKS, torch))
        if "ft_launcher" in peers and set(workloads) & set(WORKLOADS):
            python, version = systems.environment_of_nvrx(folder)
            chosen.append(systems.ft_launcher(RANKS, version, python))
        bench = Bench(folder, chosen)
        with ExitStack() as stack:
            cluster = None
            if "node_off" in workloads and os.geteuid() != 0:
                bench.failed["node_off"] = "not run: the sandbox is root's"
            elif "node_off" in workloads:
                cluster = stack.enter_context(nodes.cluster(args.sandbox, nodes.PLAIN_JOBS if measures_slurm else 0))
                slurm = cluster.slurm
                if measures_slurm:
                    cluster.begin_plain()
                off: dict[str, list[dict[str, float]]] = {"ours": cluster.ours(args.reps)}
                if cluster.our_error:
                    print(f"node_off ours: {cluster.our_error}", file=sys.stderr, flush=True)
            for workload in WORKLOADS:
                if workload in workloads:
                    bench.run(workload, HANG_REPS if workload == "hang" else args.reps)
                    names = [system.name for system in chosen]
                    figures[workload], phases[workload] = summary(bench.trials[workload], names)
                    ratios[workload] = ratio(figures[workload], names[1:])
            if cluster is not None:
                cluster.end_plain()
                plain = recorded["first_step_all"] if recorded is not None else cluster.plain
                off["slurm_requeue"] = [{"first_step": seconds} for seconds in plain]
                if cluster.our_error:
                    bench.failed["node_off.ours"] = cluster.our_error
                if cluster.plain_error:
                    bench.failed["node_off.slurm_requeue"] = cluster.plain_error
                figures["node_off"], phases["node_off"] = summary(off, ["ours", "slurm_requeue"])
                ratios["node_off"] = ratio(figures["node_off"], ["slurm_requeue"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record.emit(
        args, "recovery", figures, packages=("torch",), repetitions=args.reps, ranks=RANKS, ratios=ratios, phases=phases,
        failed=bench.failed, slurm=slurm, slurm_record=recorded and {"file": args.slurm_record, "at": recorded["at"]},
        systems={
            **{system.name: {"version": system.version, "settings": system.settings} for system in chosen},
            "slurm_requeue": {"version": slurm, "settings": "stock: SlurmdTimeout 300 s, one-node jobs, sbatch --requeue"},
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
