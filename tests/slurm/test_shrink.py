"""Four nodes are preempted and only three come back: the run goes on with three, and nobody can see it in the loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.sandbox import Sandbox
from tests.faults.checker import check
from tests.faults.history import read_history
from tests.faults.nemesis import newest_step
from tests.faults.trial import KEEP_LAST, committed, events_of
from tests.slurm.test_faults import SlurmRun

TOTAL = 50


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_loss_goes_on_with_three_of_four_nodes(sandbox: Sandbox, shared: Path) -> None:
    run = SlurmRun(sandbox, shared / "one", TOTAL)
    run.running()
    sandbox.wait_for(lambda: events_of(run.run_dir, "first_step"), 200, what="The first step")
    sandbox.wait_for(lambda: newest_step(run.run_dir) >= 12, 120, what="Twelve steps")
    high = [
        "sbatch",
        "--parsable",
        "--partition=high",
        "--nodelist=n4",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 3600",
    ]
    blocker = sandbox.exec(high, cwd=shared, check=True).stdout.strip()
    sandbox.wait_for(run.ended, 400, what="The end of the job")
    assert sandbox.job_state(run.job) == "COMPLETED", run.say()
    assert sandbox.job_state(blocker) == "RUNNING", "the fourth node never came back"
    assert run.restarts() == 1
    history = read_history(run.run_dir, checkpoints=committed(run.run_dir / "checkpoints"))
    worlds = [len(event["nodes"]) for event in history.of("attempt_started")]
    assert worlds == [4, 3], worlds
    assert check(history, total_steps=TOTAL, keep_last=KEEP_LAST) == []
    sandbox.exec(["scancel", blocker], check=True)

    undisturbed = SlurmRun(sandbox, shared / "two", TOTAL)
    sandbox.wait_for(undisturbed.ended, 400, what="The end of the job that nobody disturbed")
    expected = read_history(undisturbed.run_dir, checkpoints={}).final_curve()
    seen = history.final_curve()
    assert seen.keys() == expected.keys()
    assert max(abs(seen[step] - expected[step]) for step in seen) < 1e-5
