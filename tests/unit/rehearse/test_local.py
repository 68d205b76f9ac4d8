"""A whole rehearsal on this machine alone: no Slurm, no root, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, time
path = os.environ["RESILIENCE_CHECKPOINT_FILE"]
count = int(open(path).read()) if os.path.exists(path) else 0
while True:
    count += 1
    if os.environ["RANK"] == "0":
        with open(path, "w") as file:
            file.write(str(count))
    time.sleep(0.3)
"""


def test_a_killed_rank_is_survived_and_the_endless_job_is_ended_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = [
        sys.executable,
        "-m",
        "slurm_resilience",
        "rehearse",
        "train.py",
        "--local",
        "--faults",
        "kill-rank",
        "--nodes",
        "1",
    ]
    argv += ["--ranks-per-node", "2", "--checkpoint-file", "count.txt", "--options", "--set preload=[]", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    (outcome,) = document["outcomes"]
    assert (document["survived"], outcome["cause"], outcome["requeues"]) == (1, "rank_crash", 0)
    assert outcome["resumed_from"] > 0
    assert outcome["saved_again_s"] is not None
    said = (Path(document["run_dir"]).parent / "job.log").read_text()
    assert "run ended" in said
    assert "the time to stop is over" not in said, "it waited for ranks that cannot be asked to stop"
