"""Nodes with different numbers of GPUs on a real Slurm: each agent its own number of ranks, and the larger node is lost."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.sandbox import Sandbox

ROOT = Path(__file__).parent.parent.parent
STEPS = 30
WHOLE = 20

# On a busy machine an agent may be held up for longer than it may be by default, and each time would be an attempt more.
CALM = "limits: {agent_silence_s: 8, node_silence_s: 12}\n"
# Each rank writes down where it is, and which samples of each step it took.
SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
import torch
from slurm_resilience import Run

folder = Path(sys.argv[1])
with Run(checkpoint={{"every_steps": 4, "every_min": None}}) as run:
    run.init_process_group()
    model = torch.nn.Linear(2, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.batches(101)
    run.resume()
    with open(folder / f"{{run.attempt}}.{{run.rank}}", "a", buffering=1) as out:
        print(json.dumps({{"local": run.local_rank, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}}), file=out)
        for step in run.steps({STEPS}):
            taken = [index for micro in batches(step) if not micro.filler for index in micro.indices]
            time.sleep(0.25)
            run.sum(0)
            print(json.dumps([step, taken, batches.global_ids(step)]), file=out)
"""


def submitted(sandbox: Sandbox, shared: Path, *words: str) -> RunFolder:
    (shared / "script.py").write_text(SCRIPT)
    (shared / "taken").mkdir(exist_ok=True)
    (shared / "taken").chmod(0o777)
    own = ["--config", str(shared / "run.yaml")]
    (shared / "run.yaml").write_text(f"nodes: 1-2\nranks_per_node: 4\nglobal_batch: {WHOLE}\nmicro_batch: 2\n{CALM}")
    (shared / "batch.sh").write_text(
        "#!/bin/bash\n"
        f"exec {sys.executable} -m slurm_resilience run --run-dir {shared}/run {' '.join(own)} -- "
        f"{sys.executable} {shared}/script.py {shared}/taken\n"
    )
    argv = ["sbatch", "--parsable", "--partition=low", "--no-kill", "--time=10", f"--output={shared}/job.out", *words]
    sandbox.exec([*argv, str(shared / "batch.sh")], cwd=shared, check=True)
    return RunFolder(shared / "run")


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.path) if event["event"] == kind] if run.path.exists() else []


def until(sandbox: Sandbox, shared: Path, condition: Any, what: str) -> None:
    try:
        sandbox.wait_for(condition, 150, what=what)
    except Exception as error:
        raise AssertionError(f"{error}\n{(shared / 'job.out').read_text(errors='replace')[-3000:]}") from error


def said(folder: Path, attempt: int) -> dict[int, tuple[dict[str, Any], dict[int, Any]]]:
    """Rank → where it was, and (samples taken, samples of all) of each step."""
    found = {}
    for path in folder.glob(f"{attempt}.*"):
        first, *lines = (json.loads(line) for line in path.read_text().splitlines())
        found[int(path.suffix[1:])] = (first, {step: (taken, whole) for step, taken, whole in lines})
    return dict(sorted(found.items()))


@pytest.mark.timeout(600)
def test_two_and_four_gpus_and_the_larger_node_is_lost(sandbox: Sandbox, shared: Path) -> None:
    # Slurm gives out the first nodes first; with two of its GPUs taken, n1 has two for a job that wants six on two nodes.
    blocker = ["sbatch", "--partition=low", "--nodelist=n1", "--gpus=2", "--output=/dev/null", "--wrap=sleep 600"]
    sandbox.exec(blocker, cwd=shared, check=True)
    sandbox.wait_for(lambda: sandbox.slurm(["squeue", "-h", "-t", "R"]).stdout.strip(), 150, what="The start of the other job")
    run = submitted(sandbox, shared, "--nodelist=n1,n2", "--nodes=2", "--gpus=6")
    until(sandbox, shared, lambda: len(events(run, "checkpoint_committed")) >= 2, "The second checkpoint")
    sandbox.fault("power-off", "n2")
    until(sandbox, shared, lambda: bool(events(run, "run_completed")), "The end of the run")

    plans = [event["plan"] for event in events(run, "attempt_started")]
    assert len(plans) == 2, (shared / "job.out").read_text(errors="replace")[-5000:]
    before, after = plans
    assert (before["nodes"], before["ranks_per_node"], before["mesh"]["dp_shard"]) == (["n1", "n2"], [2, 4], 6)
    assert (after["nodes"], after["ranks_per_node"], after["mesh"]["dp_shard"]) == (["n1"], [2], 2)
    assert "changed: dp_shard 6 to 2" in after["reason"]
    assert (before["global_batch"], before["micro_batch"]) == (after["global_batch"], after["micro_batch"]) == (WHOLE, 2)

    first, second = said(shared / "taken", 1), said(shared / "taken", 2)
    assert [where["local"] for where, _ in first.values()] == [0, 1, 0, 1, 2, 3]
    assert [len(where["gpus"].split(",")) for where, _ in first.values()] == [2, 2, 4, 4, 4, 4]
    assert [where["local"] for where, _ in second.values()] == [0, 1]
    (resumed,) = events(run, "resumed")
    trained: dict[int, list[int]] = defaultdict(list)
    for attempt, steps in ((first, range(resumed["step"])), (second, range(resumed["step"], STEPS))):
        for step in steps:
            (whole,) = {tuple(told[step][1]) for _, told in attempt.values()}
            assert sorted(sample for _, told in attempt.values() for sample in told[step][0]) == sorted(whole)
            trained[step // 6] += whole  # 101 samples are five steps of 20 and a short one
    assert all(sorted(samples) == list(range(101)) for epoch, samples in trained.items() if epoch < STEPS // 6)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["--nodes=2", "--gpus-per-task=2", "--ntasks=3"], [2, 1]),
        (["--nodes=1", "--gpus=3"], [3]),
        (["--nodes=2"], [4, 4]),
    ],
    ids=["gpus_per_task", "one_node", "no_gpus"],
)
@pytest.mark.long
def test_however_the_gpus_were_asked_for(sandbox: Sandbox, shared: Path, words: list[str], ranks: list[int]) -> None:
    run = submitted(sandbox, shared, *words)
    until(sandbox, shared, lambda: bool(events(run, "run_completed")), "The end of the run")
    (plan,) = (event["plan"] for event in events(run, "attempt_started"))
    assert plan["ranks_per_node"] == ranks
    assert len(said(shared / "taken", 1)) == sum(ranks)
