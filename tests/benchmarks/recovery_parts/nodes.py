"""A node of the sandbox loses its power: our run goes on without it, and Slurm requeues a plain job.

SlurmdTimeout is at its default of 300 s.  A silent power loss: the cable first, so that nobody hears the kernel's farewell.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_resilience.errors import ResilienceError
from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox
from tests.benchmarks.recovery_parts.systems import HERE, ROOT, Mark, read_marks

PLAIN_JOBS = 5
START_S, BACK_S, REQUEUE_S = 240.0, 120.0, 1500.0
# Our nodes come first; plain jobs have theirs, and as many others free to be requeued to.
OUR_NODES = 3

PLAIN = """#!/bin/bash
export RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 OMP_NUM_THREADS=1
exec {python} {script} --folder {folder}
"""


class Cluster:
    """One sandbox for ours and for Slurm's own requeue."""

    def __init__(self, sandbox: Sandbox, folder: Path, plain_jobs: int) -> None:
        self._sandbox, self._folder, self._plain_jobs = sandbox, folder, plain_jobs
        self.plain: list[float] = []
        self.plain_error = self.our_error = ""
        self._thread: threading.Thread | None = None

    @property
    def slurm(self) -> str:
        return self._sandbox.exec(["sinfo", "--version"], check=True).stdout.strip()

    # --- Slurm's own requeue --------------------------------------------------------------------------------------------

    def begin_plain(self) -> None:
        """Start the plain jobs, cut the power of all their nodes, and wait aside for them to come back."""
        self._thread = threading.Thread(target=self._plain, daemon=True)
        self._thread.start()

    def end_plain(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _plain(self) -> None:
        try:
            self.plain = self._measure_plain()
            print(f"node_off slurm_requeue: {self.plain}", file=sys.stderr, flush=True)
        except Exception as error:
            self.plain_error = f"{type(error).__name__}: {error}"

    def _measure_plain(self) -> list[float]:
        folders = [self._own_folder(f"plain-{number}") for number in range(self._plain_jobs)]
        jobs = []
        for folder in folders:
            script = folder / "job.sh"
            script.write_text(PLAIN.format(python=sys.executable, script=HERE / "peer.py", folder=folder))
            argv = ["sbatch", "--parsable", "--requeue", "--exclusive", "--open-mode=append", "--nodes=1", self._not(ours=True)]
            argv += [f"--output={folder}/out", str(script)]
            jobs.append(self._sandbox.exec(argv, cwd=folder, check=True).stdout.strip())
        for folder in folders:
            self._sandbox.wait_for(lambda folder=folder: _steps(folder, 5), START_S, what=f"Training in {folder.name}")
        nodes = [self._sandbox.job(job)["BatchHost"] for job in jobs]
        off = self._sandbox.fault("power-off", *nodes)["off_at"]
        return [self._back(folder, float(off), REQUEUE_S) for folder in folders]

    # --- ours -----------------------------------------------------------------------------------------------------------

    def ours(self, repetitions: int) -> list[dict[str, float]]:
        """Power off a node under our run, again and again; seconds to each phase.  In between it comes back and is taken in.

        What was measured before something went wrong is returned, and ``our_error`` says what did.
        """
        out: list[dict[str, float]] = []
        try:
            self._measure_ours(out, repetitions)
        except (ResilienceError, RuntimeError) as error:
            self.our_error = str(error)
        return out

    def _measure_ours(self, out: list[dict[str, float]], repetitions: int) -> None:
        folder = self._own_folder("ours")
        words = [
            sys.executable, "-m", "slurm_resilience", "submit", "--run-dir", str(folder / "run"), "--nodes", "1-3",
            "--checkpoint-every", "10", "--exclusive", "--time=60", self._not(ours=False),
            "--", sys.executable, str(HERE / "ours.py"), "--fsdp", "--folder", str(folder),
        ]  # fmt: skip
        said = self._sandbox.exec(words, cwd=folder, env={"PYTHONPATH": str(ROOT)})
        match = re.search(r"\bjob (\d+)", said.stdout)
        if said.returncode or match is None:
            raise RuntimeError(f"submit ended with {said.returncode}: {said.stdout.strip()} {said.stderr.strip()}")
        job = match[1]
        try:
            for _ in range(repetitions):
                training = self._sandbox.wait_for(lambda: self._steady(folder), START_S, what="Steady training on two nodes")
                host = self._sandbox.job(job)["BatchHost"]
                victim = [node for node in training if node != host][-1]
                off = float(self._sandbox.fault("power-off", victim)["off_at"])
                seconds = self._back(folder, off, BACK_S)  # the rank's own word; the run's record is a little behind it
                out.append({**_phases(folder / "run", off), "first_step": seconds})
                print(f"node_off ours: {out[-1]}", file=sys.stderr, flush=True)
                self._sandbox.fault("power-on", victim, same_boot=True)
        finally:
            self._sandbox.exec(["scancel", job])

    def _steady(self, folder: Path) -> list[str]:
        """The nodes of the newest attempt, once it has trained for a while on two or more; else none."""
        started = [event for event in read_events(folder / "run") if event["event"] == "attempt_started"]
        if not started or len(started[-1]["nodes"]) < 2:
            return []
        marks = read_marks(folder)
        newest = next((mark.pid for mark in reversed(marks) if mark.rank == 0), 0)
        steps = [mark.at for mark in marks if mark.pid == newest and mark.word.startswith("step-")]
        steady = len(steps) >= 25 and steps[0] > float(started[-1]["t"]) and steps[-1] - steps[0] >= 8.0
        return list(started[-1]["nodes"]) if steady else []

    # --- both -----------------------------------------------------------------------------------------------------------

    def _back(self, folder: Path, off: float, within_s: float) -> float:
        """Seconds from the fault to the first step of another launch."""

        def first() -> Mark | None:
            marks = read_marks(folder)
            # A launch is told by its mark "started": process numbers of different nodes may be the same.
            begun = next((mark.at for mark in marks if mark.word == "started" and mark.rank == 0 and mark.at > off), None)
            after = [mark for mark in marks if mark.rank == 0 and mark.word.startswith("step-")]
            return next((mark for mark in after if begun is not None and mark.at > begun), None)

        mark = self._sandbox.wait_for(first, within_s, what=f"A step after the fault ({folder.name})")
        assert mark is not None
        return mark.at - off

    def _not(self, *, ours: bool) -> str:
        nodes = self._sandbox.nodes
        return "--exclude=" + ",".join(nodes[:OUR_NODES] if ours else nodes[OUR_NODES:])

    def _own_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        account = pwd.getpwnam("alice")
        os.chown(folder, account.pw_uid, account.pw_gid)
        return folder


def _steps(folder: Path, count: int) -> bool:
    return sum(mark.word.startswith("step-") for mark in read_marks(folder)) >= count


def _phases(run_dir: Path, off: float) -> dict[str, float]:
    """Seconds from the power cut to each event of the recovery, from the run's own record but for the fault's time."""
    names = {
        "fault_detected": "detected", "attempt_stopped": "stopped", "attempt_started": "launched", "resumed": "loaded",
    }  # fmt: skip
    out: dict[str, float] = {}
    for event in read_events(run_dir):
        if float(event["t"]) > off and event["event"] in names:
            out.setdefault(names[event["event"]], float(event["t"]) - off)
    return out


@contextmanager
def cluster(name: str, plain_jobs: int) -> Iterator[Cluster]:
    """A sandbox of its own, taken down in the end."""
    sandbox = Sandbox.up(nodes=OUR_NODES + 2 * plain_jobs, name=name)
    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-bench-"))
    folder.chmod(0o755)
    try:
        yield Cluster(sandbox, folder, plain_jobs)
    finally:
        sandbox.down()
        shutil.rmtree(folder, ignore_errors=True)
