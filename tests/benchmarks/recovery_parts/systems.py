"""Each system with the same training on this machine: started, hurt, watched until it trains again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]  # what is measured is the checkout that this file is in
START_S = 180.0
# Before a fault a launch has trained for so long: two checkpoints, and whatever a system prepares behind its training is
# ready.  The first launch of a run has more to prepare.  Faults come hours apart, not seconds.
FIRST_STEADY_S, STEADY_S = 30.0, 5.0
STEADY_STEPS = 25
PHASES = ("started", "imported", "joined", "built", "loaded")


@dataclass(frozen=True)
class Mark:
    """One line of the marks."""

    pid: int
    rank: int
    word: str
    at: float


def read_marks(folder: Path) -> list[Mark]:
    """All complete lines so far; [] before the first."""
    try:
        lines = (folder / "marks").read_text().split("\n")[:-1]
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [Mark(int(pid), int(rank), word, float(at)) for pid, rank, word, at in words]


@dataclass(frozen=True)
class System:
    """How one system runs a script.  ``settings`` goes into the report, as does ``version``."""

    name: str
    argv: Callable[[Path, Sequence[str]], list[str]]
    script: str
    environment: dict[str, str]
    settings: str
    version: str


class Job:
    """One run of one system, until it is told to end; nothing of it is alive afterwards."""

    def __init__(self, system: System, folder: Path, words: Sequence[str], ranks: int) -> None:
        self.system, self.folder, self.ranks = system, folder, ranks
        folder.mkdir(parents=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **system.environment}
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                system.argv(folder, [sys.executable, str(HERE / system.script), "--folder", str(folder), *words]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True,
            )  # fmt: skip

    def wait_until_steady(self) -> None:
        """Enough steps of the newest launch, for long enough.  Raises RuntimeError when that does not come."""

        def steady() -> bool:
            marks = read_marks(self.folder)
            newest = self._leader(marks)
            steps = [mark.at for mark in marks if mark.pid == newest and mark.word.startswith("step-")]
            first = len({mark.pid for mark in marks if mark.rank == 0}) == 1
            return len(steps) >= STEADY_STEPS and steps[-1] - steps[0] >= (FIRST_STEADY_S if first else STEADY_S)

        self._wait(steady, START_S, "steady training")

    def kill_rank(self, within_s: float) -> dict[str, float]:
        """SIGKILL to the last rank; seconds from there to each phase of the recovery."""
        marks = read_marks(self.folder)
        leader = self._leader(marks)
        victim = [mark.pid for mark in marks if mark.rank == self.ranks - 1 and mark.word == "started"][-1]
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        return self._recovery(at, leader, within_s)

    def hang_rank(self, within_s: float) -> dict[str, float]:
        """The last rank goes to sleep between two steps; seconds from there."""
        leader = self._leader(read_marks(self.folder))
        (self.folder / "hang").touch()
        hung: list[float] = []

        def fell() -> bool:
            hung[:] = [mark.at for mark in read_marks(self.folder) if mark.word == "hung"]
            return bool(hung) and not (self.folder / "hang").exists()

        self._wait(fell, 30.0, "the hang")
        return self._recovery(hung[-1], leader, within_s)

    def end(self) -> None:
        """Everything that this job started ends: whatever has its folder on its command line."""
        for send in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, send)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30.0)
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in line.read_bytes():
                    os.kill(int(line.parent.name), signal.SIGKILL)

    def _recovery(self, at: float, leader: int, within_s: float) -> dict[str, float]:
        self._wait(lambda: bool(self._first_step(at, leader)), within_s, "the first step after the fault")
        step = self._first_step(at, leader)
        assert step is not None
        out = dict.fromkeys(PHASES, 0.0)
        for mark in read_marks(self.folder):
            if mark.pid == step.pid and mark.word in out:
                out[mark.word] = mark.at - at
        return {**out, "first_step": step.at - at}

    def _first_step(self, at: float, leader: int) -> Mark | None:
        marks = read_marks(self.folder)
        return next((m for m in marks if m.at > at and m.pid != leader and m.rank == 0 and m.word.startswith("step-")), None)

    def _leader(self, marks: list[Mark]) -> int:
        """The newest rank 0."""
        return next((mark.pid for mark in reversed(marks) if mark.rank == 0), 0)

    def _wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.system.name} ended with {self._process.returncode} before {what}: {self._said()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no sign of {what} within {within_s:g} s: {self._said()}")
            time.sleep(0.02)

    def _said(self) -> str:
        return " | ".join((self.folder / "log").read_text(errors="replace").splitlines()[-4:])[-600:]


@contextmanager
def running(system: System, folder: Path, words: Sequence[str], ranks: int) -> Iterator[Job]:
    """The job, steady; ended in any case."""
    job = Job(system, folder, words, ranks)
    try:
        job.wait_until_steady()
        yield job
    finally:
        job.end()


def ours(ranks: int, version: str) -> System:
    """`slurm-resilience run --local 1`: supervisor and agent are processes of their own, as on Slurm."""

    def argv(folder: Path, command: Sequence[str]) -> list[str]:
        return [
            sys.executable, "-m", "slurm_resilience", "run", "--local", "1", "--run-dir", str(folder / "run"),
            "--nodes", "1", "--ranks-per-node", str(ranks), "--checkpoint-every", "10",
            "--set", "budgets.rank_crash=1000", "--set", "budgets.hang=1000", "--", *command,
        ]  # fmt: skip

    settings = "run --local 1, checkpoint every 10 steps, everything else by default: warm launcher, verification with a probe"
    return System("ours", argv, "ours.py", {}, settings, version)


def torchrun(ranks: int, version: str) -> System:
    """torchrun, one agent.  Without that variable its workers dial a store that dies with the killed rank's round."""

    def argv(_folder: Path, command: Sequence[str]) -> list[str]:
        return [
            command[0], "-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={ranks}",
            "--max-restarts=1000", "--monitor-interval=0.1", *command[1:],
        ]  # fmt: skip

    return System(
        "torchrun", argv, "peer.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        "--standalone --max-restarts=1000 --monitor-interval=0.1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (gloo does not recover "
        "without it); hang: process group timeout 10 s", version,
    )  # fmt: skip


def ft_launcher(ranks: int, version: str, python: str) -> System:
    """NVRx's launcher in its own environment; its monitor as fast as it goes."""

    def argv(_folder: Path, command: Sequence[str]) -> list[str]:
        return [
            str(Path(python).with_name("ft_launcher")), "--standalone", "--nnodes=1", f"--nproc-per-node={ranks}",
            "--max-restarts=1000", "--monitor-interval=0.1", "--ft-workload-check-interval=0.5",
            "--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=10", *command[1:],
        ]  # fmt: skip

    return System(
        "ft_launcher", argv, "peer.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        "--standalone --max-restarts=1000 --monitor-interval=0.1 --ft-workload-check-interval=0.5, restart policy any-failed, "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; hang: heartbeats with time-outs that it learns (safety factor 5, its default)",
        version,
    )  # fmt: skip


def environment_of_nvrx(folder: Path) -> tuple[str, str]:
    """A virtual environment with NVRx from PyPI and the torch that is here; its interpreter and NVRx's version."""
    import torch

    python = folder / "nvrx" / "bin" / "python"
    quiet: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL}
    base = os.path.realpath(sys.executable)
    subprocess.run([base, "-m", "venv", str(folder / "nvrx")], **quiet)
    site = next((folder / "nvrx" / "lib").glob("python*/site-packages"))
    (site / "torch-from-the-tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "nvidia-resiliency-ext"], **quiet)
    subprocess.run([*pip, "defusedxml", "nvidia-ml-py", "pynvml", "psutil", "pyyaml", "packaging"], **quiet)
    ask = "import importlib.metadata as m; print(m.version('nvidia-resiliency-ext'))"
    version = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    return str(python), version
