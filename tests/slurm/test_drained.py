"""The two sides meet: an admin drains a node under a running job, and the job saves and leaves it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.observe.incidents import Incidents
from slurm_resilience.sandbox import Sandbox
from tests.slurm.test_faults import SlurmRun

ENDLESS = 100_000


def newest(run: SlurmRun, name: str, since: float = 0.0) -> dict[str, Any]:
    """The newest event of that name, {} before there is one."""
    found = [dict(event) for event in read_events(run.run_dir) if event["event"] == name and float(event["t"]) >= since]
    return found[-1] if found else {}


def trains(run: SlurmRun, since: float) -> dict[str, Any]:
    """A run that has saved at least once since then."""
    return newest(run, "checkpoint_committed", since)


def drain(sandbox: Sandbox, node: str) -> float:
    sandbox.slurm(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=ADMIN: noisy fan"])
    return time.time()


@pytest.mark.timeout(600)
def test_a_job_saves_and_leaves_a_node_that_is_drained(sandbox: Sandbox, shared: Path) -> None:
    run = SlurmRun(sandbox, shared, ENDLESS)
    batch_host = run.running()["BatchHost"]
    sandbox.wait_for(lambda: trains(run, 0.0), 180, what="the first checkpoint")
    victim = next(node for node in reversed(sandbox.nodes) if node != batch_host)
    at = drain(sandbox, victim)
    sandbox.wait_for(lambda: newest(run, "node_drained"), 120, what="news of the drain")
    told = newest(run, "node_drained")
    assert told["node"] == victim
    assert "ADMIN: noisy fan" in told["reason"]
    sandbox.wait_for(lambda: newest(run, "first_step", at), 120, what="the first step without the node")
    stopped, started, resumed = (newest(run, name, at) for name in ("attempt_stopped", "attempt_started", "resumed"))
    assert (stopped["cause"], stopped["fault"], stopped["saved"]) == ("node_drained", False, True)
    assert victim not in started["nodes"]
    assert len(started["nodes"]) == 3
    assert resumed["step"] >= stopped["step"], "all that was trained was saved"
    incident = Incidents.of(read_events(run.run_dir))[-1]
    assert (incident.cause, incident.recovered, incident.steps_lost) == ("node_drained", True, 0)
    assert run.restarts() == 0
    print(
        f"heard {told['t'] - at:.1f} s after the drain, trained again {newest(run, 'first_step', at)['t'] - at:.1f} s after it"
    )
    sandbox.exec(["scancel", run.job], check=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_that_needs_all_its_nodes_goes_on_in_a_new_allocation(sandbox: Sandbox, shared: Path) -> None:
    run = SlurmRun(sandbox, shared, ENDLESS, nodes="2")
    victim = run.running()["BatchHost"]
    sandbox.wait_for(lambda: trains(run, 0.0), 180, what="the first checkpoint")
    at = drain(sandbox, victim)
    sandbox.wait_for(lambda: newest(run, "allocation_started", at), 240, what="a new allocation")
    sandbox.wait_for(lambda: newest(run, "first_step", at), 180, what="its first step")
    stopped, resumed = newest(run, "attempt_stopped", at), newest(run, "resumed", at)
    assert stopped["cause"] == "node_drained"
    assert victim not in newest(run, "allocation_started", at)["nodes"]
    assert resumed["step"] >= stopped["step"]
    assert run.restarts() == 1
    assert sandbox.wait_for(lambda: "DRAIN" in sandbox.slurm(["scontrol", "show", "node", victim]).stdout, 90)
    print(f"trained again {newest(run, 'first_step', at)['t'] - at:.1f} s after the drain")
    sandbox.exec(["scancel", run.job], check=True)
