"""The demo's stage without Slurm: four pretend nodes on this machine, and a shell script that plays the queue.

A node that loses power is played by stopping every process of the node: nothing answers any more, and nothing says so.
A preemption is the user signal that Slurm would send, and the same script started again a moment later.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from record import DemoFailed, Record, wait_for
from story import NODES

GPT = Path(__file__).resolve().parent.parent / "gpt"
QUEUE_S = 3.0


class Pretend:
    """One run of `submit.py --local`, and what Slurm would do to it."""

    lost = "is stopped, every process of it: nothing answers any more"
    preempted = "told to make room, as Slurm would, and started again"

    def __init__(self) -> None:
        self.run_dir = Path()
        self.stopped: list[psutil.Process] = []
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # four ranks share this machine's cores

    def describe(self) -> str:
        return f"no Slurm: {NODES} pretend nodes on this machine"

    def folder(self, name: str) -> Path:
        folder = Path.home() / name
        folder.mkdir(parents=True)
        return folder

    def python(self, *words: str | Path) -> str:
        argv = [sys.executable, *map(os.fspath, words)]
        done = subprocess.run(argv, capture_output=True, text=True, env=self.environment, check=False)
        if done.returncode != 0:
            raise DemoFailed(f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def reference(self, run_dir: Path, steps: int) -> None:
        self.python(GPT / "train.py", "--steps", str(steps), "--folder", run_dir)

    def submit(self, folder: Path, steps: int) -> tuple[str, Path]:
        said = self.python(GPT / "submit.py", "--local", "--folder", folder, "--steps", str(steps))
        match = re.search(r"^job \S+ in (.+)$", said, re.MULTILINE)
        if not match:
            raise DemoFailed(f"submit.py did not name its run: {said!r}")
        self.run_dir = Path(match[1])
        return "the run", self.run_dir

    def expendable_node(self) -> str:
        return f"n{NODES}"

    def on_node(self, node: str) -> list[psutil.Process]:
        """Every process of the node, parents first."""
        tops = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                if os.fspath(self.run_dir) in words and words[-2:] == ["--node", node]:
                    tops.append(process)
            except psutil.Error:
                continue
        below = [child for top in tops for child in top.children(recursive=True)]
        return list(dict.fromkeys([*tops, *below]))

    def power_off(self, node: str) -> float:
        at = time.time()
        self.stopped = self.on_node(node)
        if not self.stopped:
            raise DemoFailed(f"there is nothing on {node} to stop")
        for process in self.stopped:
            process.suspend()
        return at

    def power_on(self, node: str) -> None:
        for process in self.stopped:
            if process.is_running():
                process.resume()

    def supervisor(self) -> psutil.Process | None:
        try:
            return psutil.Process(json.loads((self.run_dir / "supervisor.json").read_text())["pid"])
        except (OSError, psutil.NoSuchProcess):
            return None

    def preempt(self) -> float:
        """Returns when the run has saved, has left, and was started again by the played queue."""
        record = Record(self.run_dir)
        before = len(record.of("allocation_started"))
        supervisor = self.supervisor()
        if supervisor is None:
            raise DemoFailed("there is no supervisor to preempt")
        at = time.time()
        supervisor.send_signal(signal.SIGUSR2)
        wait_for("the end of the preempted allocation", lambda: not supervisor.is_running() or is_zombie(supervisor), 60)
        time.sleep(QUEUE_S)  # the job of higher priority has the nodes
        script = self.run_dir / "call" / "submission.sh"
        with open(self.run_dir / "logs" / "job-local.out", "ab") as log:
            subprocess.Popen(
                ["bash", os.fspath(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=self.environment,
            )  # fmt: skip
        wait_for("the next allocation", lambda: len(record.of("allocation_started")) > before, 60)
        return at

    def restarts(self) -> int:
        return int(Record(self.run_dir).events()[-1]["restart"])

    def outcome(self) -> str | None:
        state: str = json.loads((self.run_dir / "state.json").read_text())["state"]
        return state if state != "running" else None

    def evidence(self) -> str:
        log = self.run_dir / "logs" / "supervisor.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-30:]) if log.exists() else "the run never began"

    def close(self) -> None:
        """End what is left of a run that failed."""
        supervisor = self.supervisor()
        if supervisor is not None and supervisor.is_running() and not is_zombie(supervisor):
            supervisor.send_signal(signal.SIGTERM)
        for process in self.stopped:
            if process.is_running():
                process.kill()


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
