"""A rehearsal of a script that is not ours, on a real Slurm, as whoever administers the machine runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = Path(__file__).parent.parent.parent / "examples" / "plain_ddp.py"


@pytest.mark.long
def test_a_torchrun_script_through_four_faults(machine_can: None) -> None:
    argv = [sys.executable, "-m", "slurm_resilience", "rehearse", str(PLAIN), "--name", "rehearsed", "--json"]
    argv += ["--faults", "kill-rank,power-off,preempt,time-limit", "--nodes", "1-2", "--checkpoint-file", "snapshot.pt"]
    argv += ["--args=--epochs 100000 --pause 0.1 --snapshot {checkpoint}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["survived"] == 4
    by_name = {one["fault"]: one for one in document["outcomes"]}
    assert by_name["kill-rank"]["cause"] == "rank_crash"
    assert by_name["power-off"]["cause"] == "node_lost"
    assert by_name["power-off"]["nodes_after"] == 1
    assert by_name["preempt"]["requeues"] == by_name["time-limit"]["requeues"] == 1
    saves = [by_name[name]["resumed_from"] for name in document["asked"]]
    assert saves == sorted(saves)
    assert saves[0] > 0
