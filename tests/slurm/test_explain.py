"""Nodes that go, on a real Slurm: `explain` names the node and the cause, and the run went on from the right step each time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox
from tests.faults import cast
from tests.faults.nemesis import newest_step, wait_for
from tests.faults.test_explain import explain
from tests.faults.trial import events_of
from tests.slurm.test_faults import SlurmRun

PATIENCE_S = 240.0


def old_ranks(run_dir: Path) -> list[str]:
    """Ranks of an attempt that is over."""
    ranks = cast.look(run_dir).ranks
    newest = max((rank.attempt for rank in ranks), default=0)
    return [f"rank {rank.rank} of attempt {rank.attempt} on {rank.node}" for rank in ranks if rank.attempt < newest]


def trains_on(run_dir: Path, node: str, step: int) -> bool:
    started = events_of(run_dir, "attempt_started")
    return newest_step(run_dir) > step and bool(started) and node in started[-1]["nodes"]  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_node_that_is_frozen_cut_off_or_switched_off_is_named(sandbox: Sandbox, shared: Path) -> None:
    run = SlurmRun(sandbox, shared, 120)
    batch_host = run.running()["BatchHost"]
    victims = [node for node in sandbox.nodes if node != batch_host]
    for number, (fault, undo) in enumerate((("freeze", "thaw"), ("cut", "heal"), ("power-off", None))):
        victim = victims[number]
        before = newest_step(run.run_dir)
        wait_for(f"training on {victim}", lambda b=before, v=victim: trains_on(run.run_dir, v, b + 12), PATIENCE_S, say=run.say)
        at = time.time()
        sandbox.fault(fault, victim)
        wait_for(
            f"the loss of {victim}",
            lambda a=at: any(float(event["t"]) > a for event in events_of(run.run_dir, "fault_detected")),  # type: ignore[arg-type]
            PATIENCE_S, say=run.say,
        )  # fmt: skip
        wait_for(
            "the first step without it",
            lambda a=at: any(float(event["t"]) > a for event in events_of(run.run_dir, "first_step")),  # type: ignore[arg-type]
            PATIENCE_S, say=run.say,
        )  # fmt: skip
        if undo is not None:
            sandbox.fault(undo, victim)
        wait_for("the end of old ranks", lambda: not old_ranks(run.run_dir), 60, say=lambda: str(old_ranks(run.run_dir)))
    wait_for("the end of the run", run.complete, PATIENCE_S, say=run.say)
    wait_for("the end of its ranks", lambda: not cast.look(run.run_dir).ranks, 60)
    found, text = explain(run.run_dir)
    faults = [each for each in found if each["cause"] != "grow"]
    assert [(each["cause"], each["node"]) for each in faults] == [("node_lost", node) for node in victims], text
    events = list(read_events(run.run_dir))
    for each in faults:
        assert each["recovered"]
        assert "silent for" in each["detail"]
        committed = [
            event["step"] for event in events if event["event"] == "checkpoint_committed" and event["t"] < each["t"] + 5
        ]
        assert each["resumed_step"] in (max(committed), max(committed) - 5), each
        assert f"node_lost, {each['node']}" in text
