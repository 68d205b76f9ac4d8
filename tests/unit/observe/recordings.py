"""Events of real runs: the small GPT of the examples on two or three nodes, recorded on a machine of two cores.

Taken away were paths, tracebacks, numbers of processes, and kinds of events that say nothing here.

quiet              --local 2, nothing goes wrong
two_crashes        --local 2, kill -9 of a rank at step 28 and at step 68, a save every 10 steps
supervisor_killed  --local 2, kill -9 of the supervisor at step 37, the same command 38 s later, when the ranks had stopped by
                   themselves at step 48; kill -9 again at step 80, and the same command at once
requeued           two nodes of a sandbox, `slurm-resilience requeue` at step 28
shrunk_and_grown   three nodes of a sandbox, one without power at step 25 and back later
sigterm            --local 2, SIGTERM to the supervisor
scancel            two nodes of a sandbox, scancel
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recorded")
ALL = ("quiet", "two_crashes", "supervisor_killed", "requeued", "shrunk_and_grown", "sigterm", "scancel")


def events(name: str) -> list[dict[str, Any]]:
    """The facts of a recorded run, in the order of the file."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def folder(name: str, at: Path) -> Path:
    """A run folder at ``at`` with them."""
    at.mkdir(parents=True)
    shutil.copy(FOLDER / f"{name}.jsonl", at / "events.jsonl")
    metrics = FOLDER / f"{name}.metrics.jsonl"
    if metrics.exists():
        shutil.copy(metrics, at / "metrics.jsonl")
    (at / "run.json").write_text(json.dumps({"v": 1, "run_id": name, "argv": ["python", "train.py"], "config": {}}))
    return at
