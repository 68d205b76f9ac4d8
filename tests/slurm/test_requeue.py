"""The requeue recipe on a real Slurm: a job that gives itself back to the queue, as its own ordinary user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.sandbox import Sandbox

# One run of a job: say who we are, wait for the file that lets us go on, requeue, say what came of it, leave.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
for name in ("SIGTERM", "SIGCONT", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from slurm_resilience.runtime.requeue import requeue
from slurm_resilience.slurm.cause import ask_cause
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.environment import SlurmEnvironment

folder, wishes = Path(sys.argv[1]), json.loads(sys.argv[2])
here, client = SlurmEnvironment.current(), CommandClient()
tag = here.job_id + "." + str(here.restart_count)

def say(name, **what):
    temporary = folder / (name + "." + tag + ".tmp")
    temporary.write_text(json.dumps({"at": time.time(), **what}))
    temporary.rename(folder / (name + "." + tag))

say("started", nodes=here.nodes, restart=here.restart_count)
if here.restart_count >= wishes.get("runs", 1):
    sys.exit(0)
while not (folder / ("go." + str(here.restart_count))).exists():
    time.sleep(0.05)
verdict = ask_cause(client, here.job_id, here.restart_count, heard_at=time.time(), my_nodes=here.nodes)
say("verdict", cause=verdict.cause, requeued=verdict.requeued, detail=verdict.detail)
nodes = tuple(wishes["nodes"]) if "nodes" in wishes else None
outcome = requeue(client, here.job_id, restart_count=here.restart_count, nodes=nodes, exclude=wishes.get("exclude", ()),
                  dead=wishes.get("dead", ()), start_in_s=wishes.get("start_in_s"), marker="a run")
say("outcome", ok=outcome.ok, **outcome.as_fields())
os._exit(75)
"""

SCRIPT = """#!/bin/bash
trap '' TERM CONT USR2
python {program} {folder} '{wishes}'
exit $?
"""


class Job:
    """The test's hold on one such job."""

    def __init__(self, sandbox: Sandbox, shared: Path, *options: str, **wishes: Any) -> None:
        self.sandbox, self.shared = sandbox, shared
        program, script = shared / "program.py", shared / "job.sh"
        program.write_text(PROGRAM)
        script.write_text(SCRIPT.format(program=program, folder=shared, wishes=json.dumps(wishes)))
        argv = ["sbatch", "--parsable", "--requeue", "--no-kill", "--exclusive", "--open-mode=append", "--time=30",
                f"--output={shared}/out.%j", *options, str(script)]  # fmt: skip
        self.id = sandbox.exec(argv, cwd=shared, check=True).stdout.strip()

    def go(self, restart: int = 0) -> None:
        (self.shared / f"go.{restart}").touch()

    def said(self, name: str, restart: int = 0, *, task: str = "", within: float = 100) -> dict[str, Any]:
        path = self.shared / f"{name}.{self.id}{task}.{restart}"
        self.sandbox.wait_for(path.exists, within, what=f"{path.name} of job {self.id} (now {self.sandbox.job_state(self.id)})")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def field(self, name: str, task: str = "") -> str:
        return self.sandbox.job(self.id + task).get(name, "")


def test_a_job_comes_back_in_seconds_on_other_nodes(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--nodes=2-4", "--comment=my own = comment", nodes=[2, 3], exclude=["n1", "nope"])
    assert job.said("started")["nodes"] == ["n1", "n2", "n3", "n4"]
    job.go()
    outcome = job.said("outcome")
    assert outcome["ok"], outcome
    assert outcome["excluded"] == ["n1"]
    again = job.said("started", 1, within=100)
    assert again["nodes"] == ["n2", "n3", "n4"]
    assert again["at"] - outcome["at"] <= 100, "not the 121 s of Slurm's own requeue"
    comment = job.field("Comment")
    assert comment.startswith("my own = comment [slurm-resilience excluded n1 at "), "the mark of our hold is gone"


def test_where_nothing_slows_the_end_of_a_job_it_may_begin_at_once(sandbox: Sandbox, shared: Path) -> None:
    """Near enough to meet the scheduler's second pass.  (How long it takes then is for the benchmark, on a quiet machine.)"""
    job = Job(sandbox, shared, "--nodes=1-2", nodes=[1, 2], start_in_s=2)
    job.said("started")
    job.go()
    outcome = job.said("outcome")
    assert outcome["ok"], outcome
    assert outcome["start_at"] - outcome["at"] <= 2.0
    asked = outcome["at"] - sum(seconds for _, _, seconds in outcome["steps"][-2:])  # before the controller took its time
    assert outcome["start_at"] - asked > 1.0, "set at the start of a second, so that all of it is left"
    job.said("started", 1, within=200)


def test_a_preempted_job_starts_on_what_is_left(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--partition=low", "--nodes=1-4", nodes=[1, 4])
    assert len(job.said("started")["nodes"]) == 4
    argv = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--time=5", "--output=/dev/null"]
    blocker = sandbox.exec([*argv, "--wrap=sleep 120"], cwd=shared, check=True).stdout.strip()
    sandbox.wait_for(lambda: job.field("PreemptTime") not in ("", "None"), 150, what="The preemption")
    job.go()
    assert job.said("verdict")["cause"] == "preemption"
    assert job.said("outcome")["ok"]
    again = job.said("started", 1, within=120)
    assert len(again["nodes"]) == 2
    assert sandbox.job_state(blocker) == "RUNNING"


def test_a_job_that_the_controller_has_requeued_already_is_shaped_too(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--nodes=2-4", nodes=[2, 2], exclude=["n1"])
    job.said("started")
    sandbox.exec(["scontrol", "requeue", job.id], check=True)
    sandbox.wait_for(lambda: job.field("Restarts") == "1", 90, what="The requeue")
    job.go()
    assert job.said("verdict")["requeued"] is True
    outcome = job.said("outcome")
    assert outcome["ok"], outcome
    nodes = job.said("started", 1, within=100)["nodes"]
    assert len(nodes) == 2
    assert "n1" not in nodes
    assert job.field("Restarts") == "1"


def test_a_cancelled_job_stays_cancelled(sandbox: Sandbox, shared: Path) -> None:
    """`scontrol requeuehold` would answer 0, and bring it back to life."""
    job = Job(sandbox, shared, "--nodes=2-4", nodes=[2, 4])
    job.said("started")
    sandbox.exec(["scancel", job.id], check=True)
    sandbox.wait_for(lambda: job.field("JobState") == "COMPLETING", 90, what="The end of the job")
    job.go()
    assert job.said("verdict")["cause"] == "cancelled"
    assert job.said("outcome")["action"] == "refused"
    sandbox.wait_for(lambda: job.field("JobState") == "CANCELLED", 150, what="The job to be over")
    assert job.field("Restarts") == "0"


def test_cancelled_after_the_requeue_and_before_the_start(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--nodes=2-4", nodes=[2, 4])
    job.said("started")
    sandbox.exec(["scontrol", "requeue", job.id], check=True)
    sandbox.exec(["scancel", job.id], check=True)
    job.go()
    assert job.said("outcome")["action"] == "refused"
    sandbox.wait_for(lambda: job.field("JobState") == "CANCELLED", 150, what="The job to be over")
    assert job.field("Restarts") == "1"


def test_one_task_of_an_array_alone(sandbox: Sandbox, shared: Path) -> None:
    """The last task has SLURM_JOB_ID = SLURM_ARRAY_JOB_ID: by its number all tasks would be requeued.  Lightning#15022."""
    job = Job(sandbox, shared, "--nodes=1", "--array=1-2", nodes=[1, 1])
    first = job.said("started", task="_1")
    job.said("started", task="_2")
    (shared / "go.0").touch()
    assert job.said("outcome", task="_1")["ok"]
    assert job.said("outcome", task="_2")["ok"]
    assert job.said("started", 1, task="_1", within=100)["at"] > first["at"]
    job.said("started", 1, task="_2", within=100)
    for task in ("_1", "_2"):
        assert job.field("Restarts", task) == "1", "each task requeued itself, and nobody else"


def test_a_job_that_may_not_be_requeued_is_allowed_to_first(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--nodes=1", "--no-requeue", nodes=[1, 1])
    job.said("started")
    job.go()
    assert job.said("outcome")["ok"]
    job.said("started", 1, within=100)


def test_exclusions_never_leave_too_few_nodes(sandbox: Sandbox, shared: Path) -> None:
    """Asking for three of four nodes without two of them would never start."""
    job = Job(sandbox, shared, "--nodes=3-4", nodes=[3, 4], exclude=["n4", "n3", "n2"])
    job.said("started")
    job.go()
    assert job.said("outcome")["excluded"] == ["n4"], "the first suspect only"
    assert job.said("started", 1, within=100)["nodes"] == ["n1", "n2", "n3"]


def test_a_leftover_does_not_touch_the_newer_run(sandbox: Sandbox, shared: Path) -> None:
    """When only slurmd died, the old batch script lives on while the job runs elsewhere."""
    from slurm_resilience.runtime.requeue import requeue

    job = Job(sandbox, shared, "--nodes=1", runs=5)
    job.said("started")
    outcome = requeue(_client(sandbox), job.id, restart_count=-1, patience_s=5)
    assert outcome.action == "refused"
    assert "newer run" in outcome.reason
    assert job.field("JobState") == "RUNNING"
    assert job.field("Priority") != "0"


def test_a_hold_whose_owner_died_is_swept_and_a_users_own_is_not(sandbox: Sandbox, shared: Path) -> None:
    from slurm_resilience.slurm.mark import Marks
    from slurm_resilience.slurm.waiting import sweep

    client = _client(sandbox)
    orphan, wished = Job(sandbox, shared, "--nodes=1", runs=5), Job(sandbox, shared, "--nodes=1", runs=5)
    for job in (orphan, wished):
        job.said("started")
    client.update(orphan.id, Comment=str(Marks("mine").held_by("a run", 1_000_000_000.0)))
    for job in (orphan, wished):
        assert client.requeuehold(job.id)
        sandbox.wait_for(lambda job=job: job.field("JobState") == "PENDING", 150, what="The hold")
    assert [(each.job_id, each.helped) for each in sweep(client, "alice")] == [(orphan.id, True)]
    orphan.said("started", 1, within=100)
    assert orphan.field("Comment") == "mine"
    assert wished.field("Priority") == "0"


def test_a_dead_node_is_taken_out_first(sandbox: Sandbox, shared: Path) -> None:
    """A job that still holds a dead node hangs in COMPLETING until Slurm has noticed, minutes later."""
    job = Job(sandbox, shared, "--nodes=2-4", nodes=[2, 3], exclude=["n4"], dead=["n4"])
    job.said("started")
    sandbox.fault("power-off", "n4")
    job.go()
    outcome = job.said("outcome", within=100)
    assert outcome["ok"], outcome
    assert job.said("started", 1, within=100)["nodes"] == ["n1", "n2", "n3"]


def _client(sandbox: Sandbox) -> Any:
    """A client that speaks to the sandbox as alice, from outside of any job."""
    from slurm_resilience.slurm import child
    from slurm_resilience.slurm.client import CommandClient

    class AsAlice(CommandClient):
        def _run(self, *argv: str, **more: Any) -> child.Finished:
            return super()._run(*sandbox.exec_command(argv), **more)

    return AsAlice(timeout_s=30)


@pytest.mark.long
@pytest.mark.timeout(1500)  # each waits for the scheduler's next pass, half a minute or so
def test_twenty_requeues_and_none_is_lost(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--nodes=1-2", nodes=[1, 2], runs=20)
    waits = []
    for restart in range(20):
        job.go(restart)
        outcome = job.said("outcome", restart, within=100)
        assert outcome["ok"], outcome
        waits.append(job.said("started", restart + 1, within=200)["at"] - outcome["at"])
    waits.sort()
    assert waits[-2] <= 40, waits  # P95 of 20


@pytest.mark.long
def test_at_the_time_limit_while_slurm_is_killing_it(sandbox: Sandbox, shared: Path) -> None:
    job = Job(sandbox, shared, "--nodes=1", "--time=1", nodes=[1, 1])
    job.said("started")
    sandbox.wait_for(lambda: job.field("Reason") == "TimeLimit", 150, what="The time limit")
    job.go()
    assert job.said("verdict")["cause"] == "time_limit"
    assert job.said("outcome")["ok"]
    job.said("started", 1, within=100)


@pytest.mark.long
def test_preempted_where_the_mode_is_cancel(sandbox: Sandbox, shared: Path) -> None:
    """Slurm would not requeue it: the job does, in its grace period, and even in the middle of its end.  MFC#1771."""
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"low.PreemptMode": "CANCEL", "low.GraceTime": "0"})
    job = Job(sandbox, shared, "--partition=low", "--nodes=4", nodes=[1, 4])
    job.said("started")
    sandbox.fault("preempt", seconds=5.0)
    sandbox.wait_for(lambda: job.field("JobState") == "COMPLETING", 150, what="The preemption")
    job.go()
    assert job.said("verdict")["cause"] == "preemption"
    assert job.said("outcome")["ok"]
    job.said("started", 1, within=120)


@pytest.mark.long
def test_a_scontrol_that_hangs_for_a_while(sandbox: Sandbox, shared: Path) -> None:
    """submitit#1713."""
    job = Job(sandbox, shared, "--nodes=1", nodes=[1, 1])
    job.said("started")
    sandbox.fault("break-scontrol", how="hang")
    job.go()
    job.said("verdict", within=100)  # whatever it was told, it was told in time
    sandbox.fault("break-scontrol", off=True)
    assert job.said("outcome", within=100)["ok"]
    job.said("started", 1, within=100)
