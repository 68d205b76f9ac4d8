"""One run, tormented: start it, let the nemesis at it, watch for leftovers all the while, collect the history."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from slurm_resilience.observe.events import read_events
from tests.faults import cast
from tests.faults.history import History, read_history
from tests.faults.nemesis import Fault, Nemesis, wait_for

ROOT = Path(__file__).parents[2]
GPT = ROOT / "examples" / "gpt" / "train.py"
GLOBAL_BATCH, EVERY_STEPS, KEEP_LAST = 12, 5, 3
# Four ranks share two cores with everything else on this machine; what is slow is not what is tested here.
# A supervisor that took the place of another waits for the batch script to end the job before it does.
GONE_S = 120
START_S, STEP_S, END_S = 180.0, 120.0, 180.0


def command(total_steps: int) -> list[str]:
    """The workload: the example, small and paced, so that a fault finds it in the middle of something."""
    return [
        sys.executable, os.fspath(GPT), "--steps", str(total_steps), "--sleep", "0.05", "--validate-every", "0",
    ]  # fmt: skip


def options(run_dir: Path) -> list[str]:
    return [
        "--run-dir", os.fspath(run_dir), "--nodes", "2-4", "--global-batch", str(GLOBAL_BATCH), "--micro-batch", "3",
        "--checkpoint-every", str(EVERY_STEPS), "--set", f"checkpoint.keep_last={KEEP_LAST}",
    ]  # fmt: skip


class LocalRun:
    """`slurm-resilience run --local`, with what the batch script does around it: a supervisor that dies is started again."""

    def __init__(self, run_dir: Path, total_steps: int, nodes: int = 4) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_name(run_dir.name + ".log")
        self._argv = [sys.executable, "-m", "slurm_resilience", "run", "--local", str(nodes), *options(run_dir), "--"]
        self._argv += command(total_steps)
        self._codes: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._shell = threading.Thread(target=self._keep_running, daemon=True)

    def __enter__(self) -> LocalRun:
        self._shell.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        seen = cast.look(self.run_dir)
        for process in [*seen.supervisors, *seen.agents.values()]:
            process.send(signal.SIGKILL)
        self._shell.join(60)

    def _keep_running(self) -> None:
        while not self._stopping:
            with open(self.log, "ab") as log:
                self._child = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/tmp")
                self._codes.append(self._child.wait())
            if self._codes[-1] >= 0:
                return

    def ended(self) -> bool:
        return not self._shell.is_alive()

    def code(self) -> int:
        return self._codes[-1]

    def say(self) -> str:
        """The last of what the supervisor said."""
        text = self.log.read_text(errors="replace") if self.log.exists() else "nothing was said"
        return "\n" + "\n".join(text.splitlines()[-25:])


class Watch:
    """Looks at the processes of the run several times a second, and writes down every overlap of two attempts."""

    def __init__(self, run_dir: Path) -> None:
        self.overlaps: list[str] = []
        self.looks = 0
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.looks += 1
            ranks = cast.look(self._run_dir).ranks
            newest = max((rank.attempt for rank in ranks), default=0)
            # one look takes some milliseconds: an old rank counts only if it still lives after the new one was seen
            old = [rank for rank in ranks if rank.attempt < newest and rank.process.alive()]
            self.overlaps += [
                f"rank {rank.rank} of attempt {rank.attempt} lives on {rank.node} beside {newest}" for rank in old
            ]


def events_of(run_dir: Path, *kinds: str) -> list[dict[str, object]]:
    return [event for event in read_events(run_dir) if event["event"] in kinds]


def torment(
    run_dir: Path,
    faults: Iterable[Fault],
    nemesis: Nemesis,
    *,
    ended: Callable[[], bool],
    say: Callable[[], str],
) -> History:
    """Fire all faults, wait for the end, and return what happened."""
    with Watch(run_dir) as watch:
        wait_for("the first step", lambda: bool(events_of(run_dir, "first_step")), START_S, say=say)
        for fault in faults:
            if fault.kind == "supervisor":
                before = len(events_of(run_dir, "supervisor_restarted"))
                nemesis.fire(fault, within_s=STEP_S, say=say)
                wait_for(
                    "the supervisor's return",
                    lambda n=before: len(events_of(run_dir, "supervisor_restarted")) > n,
                    STEP_S,
                    say=say,
                )
            else:
                nemesis.fire(fault, within_s=STEP_S, say=say)
        wait_for("the end of the run", ended, END_S, say=say)
        left: list[str] = []

        def gone() -> bool:
            left[:] = cast.look(run_dir).everybody()
            return not left

        deadline = time.monotonic() + GONE_S
        while not gone() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert watch.looks > 20, "nobody watched"
    history = read_history(run_dir, checkpoints=committed(run_dir / "checkpoints"))
    history.faults, history.overlaps, history.left_alive = nemesis.fired, watch.overlaps, left
    return history


def committed(root: Path) -> dict[str, int]:
    """Complete checkpoints on disk, by their names and manifests alone."""
    found = {}
    for manifest in root.glob("step-*/manifest.json"):
        match = re.fullmatch(r"step-(\d+)-a\d+-[0-9a-f]+", manifest.parent.name)
        if match:
            found[manifest.parent.name] = int(match[1])
    return found
