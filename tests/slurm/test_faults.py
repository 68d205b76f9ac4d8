"""kill -9 of everybody on a real Slurm, on the batch host and off it, at seeded moments; the whole history is judged.

One job takes all faults of a seed, one after the other.  The normal run has one of each; the long one ten and more.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience.sandbox import Sandbox
from slurm_resilience.slurm.states import parse_state
from tests.faults.checker import check
from tests.faults.nemesis import Fault, Fired, Nemesis, draw, newest_step, wait_for
from tests.faults.trial import EVERY_STEPS, KEEP_LAST, ROOT, events_of, torment

EVERYBODY = [(kind, here) for kind in ("rank", "launcher", "agent") for here in (True, False)]
EVERYBODY += [("supervisor", True), ("slurmctld", False)]
SPACING = 12


class SlurmRun:
    """A job of alice's, submitted by one call of submit_resilient."""

    def __init__(self, sandbox: Sandbox, folder: Path, total_steps: int, nodes: str = "2-4", spares: int = 0) -> None:
        self.sandbox = sandbox
        words = [
            sys.executable, os.fspath(ROOT / "examples" / "gpt" / "submit.py"), "--folder", os.fspath(folder), "--nodes", nodes,
            "--steps", str(total_steps), "--checkpoint-every", str(EVERY_STEPS), "--sleep", "0.05", "--spares", str(spares),
        ]  # fmt: skip
        said = sandbox.exec(words, check=True).stdout
        match = re.search(r"^job (\d+) in (.+)$", said, re.MULTILINE)
        assert match, said
        self.job, self.run_dir = match[1], Path(match[2])

    def running(self) -> dict[str, str]:
        return self.sandbox.wait_for(self._if_running, 150, what=f"The start of job {self.job}")

    def _if_running(self) -> dict[str, str]:
        job = self.sandbox.job(self.job)
        return job if job.get("JobState") == "RUNNING" else {}

    def ended(self) -> bool:
        state = self.sandbox.job_state(self.job)
        return not state or parse_state(state).ended  # SIGNALING, for a moment, is no end

    def complete(self) -> bool:
        """The run has ended.  Its job may stay COMPLETING for as long as Slurm waits for a node that is off."""
        return "complete" in (self.run_dir / "state.json").read_text()

    def restarts(self) -> int:
        return int(self.sandbox.job(self.job)["Restarts"])

    def say(self) -> str:
        log = self.run_dir / "logs" / "supervisor.log"
        return "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else ""


class SlurmNemesis(Nemesis):
    """Also kills slurmctld, and wants training to go on while it is dead."""

    def __init__(self, run: SlurmRun, batch_host: str) -> None:
        super().__init__(run.run_dir, batch_host)
        self._run = run

    def fire(self, fault: Fault, *, within_s: float, say: Callable[[], str] = str) -> Fired:
        if fault.kind != "slurmctld":
            return super().fire(fault, within_s=within_s, say=say)
        self.wait_for_moment(fault, within_s, say)
        at, step = time.time(), newest_step(self.run_dir)
        killed = self._run.sandbox.fault("kill-controller")
        wait_for("training without slurmctld", lambda: newest_step(self.run_dir) >= step + 3, within_s, say=say)
        self._run.sandbox.fault("restart-controller")
        return self.remember(fault, "ctl", killed["pid"], at)


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 21))])
@pytest.mark.timeout(1200)
def test_kill_everybody(seed: int, sandbox: Sandbox, shared: Path) -> None:
    faults = draw(seed, EVERYBODY, first_step=7, spacing=SPACING)
    total = faults[-1].step + SPACING
    run = SlurmRun(sandbox, shared, total)
    nemesis = SlurmNemesis(run, run.running()["BatchHost"])
    history = torment(run.run_dir, faults, nemesis, ended=run.ended, say=run.say)
    assert sandbox.job_state(run.job) == "COMPLETED", run.say()
    assert run.restarts() == 0, "a kill inside the allocation must not cost a requeue"
    assert sorted((fault.kind, fault.on_batch_host) for fault in history.faults) == sorted(EVERYBODY)
    assert check(history, total_steps=total, keep_last=KEEP_LAST) == []


class PowerOff(Nemesis):
    """Cuts a node's power: the batch host's, or another's."""

    def __init__(self, run: SlurmRun, batch_host: str) -> None:
        super().__init__(run.run_dir, batch_host)
        self._sandbox = run.sandbox

    def fire(self, fault: Fault, *, within_s: float, say: Callable[[], str] = str) -> Fired:
        self.wait_for_moment(fault, within_s, say)
        others = [node for node in self._sandbox.nodes if node != self.batch_host]
        victim = self.batch_host if fault.on_batch_host else others[-1 - fault.choice % len(others)]
        happened = self._sandbox.fault("power-off", victim)
        return self.remember(fault, victim, 0, float(happened["off_at"]))


@pytest.mark.timeout(600)
def test_power_off_costs_seconds_and_no_requeue(sandbox: Sandbox, shared: Path) -> None:
    """SlurmdTimeout is at its default of 300 s: nobody but us can have noticed in time."""
    total = 40
    run = SlurmRun(sandbox, shared, total)
    nemesis = PowerOff(run, run.running()["BatchHost"])
    history = torment(run.run_dir, [Fault("node", False, 12, 0.1, 0)], nemesis, ended=run.complete, say=run.say)
    off = history.faults[0].t
    assert run.restarts() == 0
    back = min(float(event["t"]) for event in events_of(run.run_dir, "first_step") if float(event["t"]) > off)
    assert back - off < 150, f"{back - off:.1f} s from power-off to the first resumed step; Slurm notices after 300"
    assert check(history, total_steps=total, keep_last=KEEP_LAST) == []


@pytest.mark.long  # Slurm gives the job back only two minutes after the run has ended
@pytest.mark.timeout(900)
def test_the_batch_host_dies_and_the_run_goes_on_and_ends_its_job_by_itself(sandbox: Sandbox, shared: Path) -> None:
    """Nobody is left to restart a supervisor: an agent takes its place.  In the end it has Slurm end the job, with its code.

    That waits for Slurm to give the dead node up (SlurmdTimeout, 300 s), which the admin does here at once.
    """
    total = 30
    run = SlurmRun(sandbox, shared, total)
    nemesis = PowerOff(run, run.running()["BatchHost"])
    history = torment(run.run_dir, [Fault("node", True, 12, 0.1, 0)], nemesis, ended=run.complete, say=run.say)
    off, victim = history.faults[0].t, history.faults[0].node
    (taken,) = events_of(run.run_dir, "supervisor_took_over")
    assert taken["node"] == victim == nemesis.batch_host
    back = min(float(event["t"]) for event in events_of(run.run_dir, "first_step") if float(event["t"]) > off)
    print(f"{float(taken['t']) - off:.1f} s to the takeover, {back - off:.1f} s to the first resumed step")
    assert back - off < 120, "Slurm itself would have noticed after 300 s; 8 s is usual, and a busy machine needs longer"
    assert {event["restart"] for event in events_of(run.run_dir, "attempt_started")} == {0}, "it went on in its allocation"
    assert check(history, total_steps=total, keep_last=KEEP_LAST) == []
    sandbox.exec(["scontrol", "update", f"NodeName={victim}", "State=DOWN", "Reason=off"], root=True, check=True)
    sandbox.wait_for(run.ended, 240, what=f"the end of job {run.job}, for which no batch script was left")
    job = sandbox.job(run.job)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), run.say()
    assert len(events_of(run.run_dir, "run_completed")) == 1
    assert [event["how"] for event in events_of(run.run_dir, "job_ended_for_batch_host")] == ["requeued"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_spare_takes_the_place_of_a_node_that_lost_its_power(sandbox: Sandbox, shared: Path) -> None:
    """Four nodes, one of them spare: the mesh stays what it was."""
    total = 30
    run = SlurmRun(sandbox, shared, total, nodes="3", spares=1)
    nemesis = PowerOff(run, run.running()["BatchHost"])
    history = torment(run.run_dir, [Fault("node", False, 12, 0.1, 1)], nemesis, ended=run.complete, say=run.say)
    victim = history.faults[0].node
    first, second = events_of(run.run_dir, "attempt_started")
    assert len(first["nodes"]) == len(second["nodes"]) == 3  # type: ignore[arg-type]
    assert victim in first["nodes"]  # type: ignore[operator]
    assert victim not in second["nodes"]  # type: ignore[operator]
    assert first["plan"]["mesh"] == second["plan"]["mesh"]  # type: ignore[index]
    assert check(history, total_steps=total, keep_last=KEEP_LAST) == []
    # the dead node is taken out of the job before its end, so that Slurm does not keep it COMPLETING for SlurmdTimeout
    sandbox.wait_for(run.ended, 150, what=f"the end of job {run.job} with a dead node")
    assert sandbox.job_state(run.job) == "COMPLETED"
