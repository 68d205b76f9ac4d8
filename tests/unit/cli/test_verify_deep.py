"""``checkpoints verify --deep``: the script's own objects take the state, everything is asked, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from tests.unit.training.forge import forged

SCRIPT = """
import sys, torch
from slurm_resilience import Run
torch.manual_seed(1)
run = Run(checkpoint={"every_steps": 2})
run.init_process_group()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=optimizer)
x = torch.ones(1, 3)
run.probe(lambda x: model(x).pow(2).mean(), x)
print("the script talks")
run.resume()
for step in run.steps(int(sys.argv[1])):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
"""


def look(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def asked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capfd.readouterr()
    code = main(["checkpoints", "verify", *words])
    return code, capfd.readouterr().out


def test_it_checks_all_that_a_resume_checks_and_leaves_no_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train it.py"
    script.write_text(SCRIPT)
    run_dir = tmp_path / "resilience-run"
    subprocess.run([sys.executable, str(script), "4"], cwd=tmp_path, check=True, timeout=300)
    command = ["--", sys.executable, str(script), "9"]
    before = look(run_dir)

    code, out = asked(capfd, "--deep", str(run_dir), *command)
    assert code == ExitCode.OK
    assert out.startswith("step-00000004-")
    for named in ("state digest: expected 9 tensors", "probe loss", "learning rate of optimizer", "copies that differ"):
        assert named in out
    assert "the script talks" not in out
    assert look(run_dir) == before

    with forged(run_dir / "checkpoints") as it:
        it.tensors["model.weight"][0, 0] += 1
    before = look(run_dir)
    code, out = asked(capfd, "--deep", "--all", "--json", str(run_dir), *command)
    assert code == ExitCode.BAD_CHECKPOINT
    found: list[dict[str, Any]] = json.loads(out)
    assert [(one["step"], one["good"]) for one in found] == [(4, False), (2, True)]
    assert "model.weight holds other bits" in found[0]["reason"]
    assert look(run_dir) == before

    code, _ = asked(capfd, "--deep", "--quarantine", str(run_dir), *command)
    assert code == ExitCode.BAD_CHECKPOINT
    (bad,) = [entry for entry in CheckpointStore.open(run_dir / "checkpoints").entries() if not entry.usable]
    assert bad.step == 4
    assert "state digest" in bad.reason


def test_a_script_that_does_not_answer_is_told_apart_from_a_bad_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, str(script), "2"], cwd=tmp_path, check=True, timeout=300)
    assert main(["checkpoints", "verify", "--deep", str(tmp_path / "resilience-run"), "--", sys.executable, "-c", "1"])
    assert "ended before run.resume()" in capfd.readouterr().err
    assert main(["checkpoints", "verify", "--deep", str(tmp_path / "resilience-run")]) == ExitCode.CONFIG_ERROR
