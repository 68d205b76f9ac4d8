"""The demo's stage on a real Slurm: a sandbox of four nodes on this machine, and alice, who may do nothing special."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import DemoFailed
from story import NODES

HERE = Path(__file__).resolve().parent
GPT = HERE.parent / "gpt"
NAME = "demo"


def product(*words: str, check: bool = True) -> str:
    """Run a command of slurm-resilience and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "slurm_resilience", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise DemoFailed(f"`slurm-resilience {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class OnSlurm:
    """A sandbox that this demo brings up, and one job in it."""

    lost = "has lost power, silently,"
    preempted = "a job of higher priority has taken the nodes"

    def __init__(self) -> None:
        self.job = ""
        print("bringing up a Slurm of four nodes (the first time, its packages are installed) …", flush=True)
        print(product("sandbox", "up", "--name", NAME, "--nodes", str(NODES)), end="", flush=True)
        product("sandbox", "heal", "--name", NAME)

    def describe(self) -> str:
        version = self.alice("sinfo", "--version").split()[-1]
        timeout = self.alice("sh", "-c", "scontrol show config | grep ^SlurmdTimeout").partition("=")[2].strip()
        return f"Slurm {version}, nodes n1 to n{NODES}, SlurmdTimeout {timeout}"

    def alice(self, *argv: str) -> str:
        """Run a command as alice on the login host."""
        # one thread a process: four ranks share this machine's cores
        return product("sandbox", "exec", "--name", NAME, "--env", "OMP_NUM_THREADS=1", "--", *argv)

    def folder(self, name: str) -> Path:
        """A new folder of alice's on the file system that all nodes share."""
        return Path(self.alice("sh", "-c", f"d=$HOME/{name} && mkdir -p $d && cd $d && pwd -P").strip())

    def fault(self, *words: str) -> dict[str, Any]:
        happened: dict[str, Any] = json.loads(product("sandbox", "fault", *words, "--name", NAME, "--json"))
        return happened

    def reference(self, run_dir: Path, steps: int) -> None:
        self.alice(sys.executable, os.fspath(GPT / "train.py"), "--steps", str(steps), "--folder", os.fspath(run_dir))

    def submit(self, folder: Path, steps: int) -> tuple[str, Path]:
        said = self.alice(sys.executable, os.fspath(GPT / "submit.py"), "--folder", os.fspath(folder), "--steps", str(steps))
        match = re.fullmatch(r"job (\d+) in (.+)", said.strip().splitlines()[-1])
        if not match:
            raise DemoFailed(f"submit.py did not name its job: {said!r}")
        self.job = match[1]
        return f"job {self.job}", Path(match[2])

    def field(self, name: str) -> str:
        words = self.alice("scontrol", "-o", "show", "job", self.job).split()
        found = [word.partition("=")[2] for word in words if word.startswith(name + "=")]
        if not found:
            raise DemoFailed(f"scontrol does not show {name} of job {self.job}")
        return found[0]

    def expendable_node(self) -> str:
        """A node of the job that is not its batch host."""
        listed = self.alice("scontrol", "show", "hostnames", self.field("NodeList")).split()
        return next(node for node in reversed(listed) if node != self.field("BatchHost"))

    def power_off(self, node: str) -> float:
        happened = self.fault("power-off", node)
        return float(happened["off_at"])

    def power_on(self, node: str) -> None:
        self.fault("power-on", node)
        # a node that comes back with a new boot time is DOWN for Slurm until an admin, or ReturnToService=2, says otherwise
        self.fault("resume", node)

    def preempt(self) -> float:
        return float(self.fault("preempt", "--seconds", "5")["preempted_at"])

    def restarts(self) -> int:
        return int(self.field("Restarts"))

    def outcome(self) -> str | None:
        state = self.field("JobState")
        return state if state not in ("RUNNING", "COMPLETING") else None

    def evidence(self) -> str:
        return self.alice("squeue", "-l") + self.alice("sinfo")

    def close(self) -> None:
        product("sandbox", "down", "--name", NAME, check=False)
