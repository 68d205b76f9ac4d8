"""A node on which ranks crash is left out, says why on every screen, and is taken back by its user's word."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from slurm_resilience.observe.accounts import account
from slurm_resilience.observe.events import read_for_standing
from slurm_resilience.plan.as_it_was import as_it_was
from slurm_resilience.sandbox import Sandbox
from tests.faults import cast
from tests.faults.nemesis import newest_step
from tests.faults.trial import events_of
from tests.slurm.test_faults import SlurmRun


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_suspect_is_taken_back_and_the_run_is_replayed_as_it_was(sandbox: Sandbox, shared: Path) -> None:
    run = SlurmRun(sandbox, shared, 120, nodes="1-2")
    run.running()

    def firsts() -> int:
        return len(events_of(run.run_dir, "first_step"))

    sandbox.wait_for(firsts, 200, what="The first step")
    bad = str(events_of(run.run_dir, "attempt_started")[-1]["nodes"][-1])  # type: ignore[index]
    for count in (1, 2):
        sandbox.wait_for(lambda count=count: newest_step(run.run_dir) >= 12 * count, 100, what="Some steps")  # type: ignore[misc]
        next(rank for rank in cast.look(run.run_dir).ranks if rank.node == bad).process.send(signal.SIGSEGV)
        sandbox.wait_for(lambda count=count: firsts() > count, 100, what="The next attempt")  # type: ignore[misc]
    assert len(events_of(run.run_dir, "attempt_started")[-1]["nodes"]) == 1  # type: ignore[arg-type]
    why = "left out: 2 crashes began there, and none elsewhere"
    assert why in told(sandbox, "status", str(run.run_dir))
    assert f"nodes forgive RUN {bad}" in told(sandbox, "explain", str(run.run_dir), bad)
    assert f"{bad} is taken back" in told(sandbox, "nodes", "forgive", str(run.run_dir), bad)
    sandbox.wait_for(lambda: firsts() > 3, 100, what="The attempt with both nodes")
    assert [len(event["nodes"]) for event in events_of(run.run_dir, "attempt_started")] == [2, 2, 1, 2]  # type: ignore[arg-type]
    sandbox.wait_for(run.ended, 300, what="The end of the job")
    found = account(read_for_standing(run.run_dir))
    assert [failure.cause for failure in found.trace.failures] == ["rank_crash", "rank_crash"]
    assert len(found.trace.moves) == 1
    assert as_it_was(found.trace, found.measured).ledger.ettr == pytest.approx(found.ledger.ettr, rel=0.02)


def told(sandbox: Sandbox, *words: str) -> str:
    return " ".join(sandbox.exec([sys.executable, "-m", "slurm_resilience", *words], check=True).stdout.split())
