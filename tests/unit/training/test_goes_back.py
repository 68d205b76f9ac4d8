"""The whole way back with a real supervisor: first steps that betray the state, a relaunch, an older checkpoint, the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.training.metrics import history

from .forge import forged

SCRIPT = """
import sys, torch
from slurm_resilience import Run
run = Run(checkpoint={"every_steps": 5, "keep_last": 9, "background": False})
torch.manual_seed(7)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
run.register(model=model, optimizer=optimizer)
run.resume()
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
for step in run.steps(40):
    if str(step) == sys.argv[1]:
        break
    optimizer.zero_grad()
    loss = (model(x) - x[:, :4]).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    run.report(loss=loss, grad_norm=norm)
"""


def call(*words: str | Path, **environment: str) -> None:
    """To its end, and that is a good one."""
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(900)
def test_a_supervised_run_goes_back_by_itself(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT)
    call(script, "26", RESILIENCE_RUN_DIR=str(run_dir))
    with forged(run_dir / "checkpoints", digest=True) as it:
        it.tensors["model.weight"].mul_(30.0)
    (run_dir / "metrics.jsonl").write_text("".join((run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:25]))
    call("-m", "slurm_resilience", "run", "--local", "1", "--run-dir", run_dir, "--", sys.executable, script, "never")
    events = [event for event in read_events(run_dir) if event["attempt"] > 1]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [25, 20]
    (stopped, *_) = [event for event in events if event["event"] == "attempt_stopped"]
    assert (stopped["cause"], stopped["fault"]) == ("bad_checkpoint", True)
    assert [event["verdict"] for event in events if event["event"] == "first_steps_checked"] == ["failed", "passed"]
    lines = history(run_dir)
    assert list(lines) == list(range(1, 41))
    assert {line["attempt"] for step, line in lines.items() if step > 20} == {3}
