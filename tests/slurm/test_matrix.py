"""Whatever Slurm does to a job, of whatever shape: the right outcome, step, cause, and a job object that is right.

Ranks are cheap (cheap_rank.py) and a `watch` runs beside, so that a cell costs what Slurm costs.  A few cells are always run,
all of them with --long.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox
from tests.slurm.cheap_rank import EVERY

RANK = Path(__file__).with_name("cheap_rank.py")
SUBMIT = """
import json, sys
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.prepare import Work
nodes, tasks, folder, rank = json.loads(sys.argv[1])
calm = {{"agent_silence_s": 8, "node_silence_s": 12}}  # an agent that a busy machine holds up would be an attempt more
config = ResilienceConfig.build({{"nodes": nodes, "preload": [], "limits": calm, **{config}}})
executor = ResilientExecutor(folder, config=config)
executor.update_parameters(partition="low", time=30, exclusive=True, name="cell",
                           setup=["export PYTHONPATH={no_torch}", *{setup!r}])
work = Work(command=(sys.executable, *rank))
jobs = executor.submit_works([work] * tasks) if tasks else [executor.submit_work(work)]
print(json.dumps([[job.job_id, str(job.run_dir)] for job in jobs]))
"""
WAIT = """
import json, sys
from slurm_resilience import ResilientJob
job = ResilientJob.from_dir(sys.argv[1])
failure = job.exception()
print(json.dumps({"state": job.state, "cause": failure.cause.value if failure else None, "exit_code": job.exit_code,
                  "attempts": job.attempts, "failure": str(failure)}))
"""
SHAPES = {"one": ((1, 1), 0), "four": ((1, 4), 0), "task": ((1, 1), 2)}


@dataclass
class Cell:
    """One job (or array) and everything that a scenario does with it."""

    sandbox: Sandbox
    shared: Path
    shape: str
    config: dict[str, Any] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes, tasks = SHAPES[self.shape]
        # An interpreter without torch: importing it for nobody would cost more than everything else here.
        no_torch = self.shared / "no-torch"
        no_torch.mkdir(exist_ok=True)
        (no_torch / "torch.py").write_text("raise ImportError('there is no torch here')\n")
        (self.shared / "submit.py").write_text(SUBMIT.format(config=self.config, no_torch=no_torch, setup=self.setup))
        (self.shared / "wait.py").write_text(WAIT)
        what = json.dumps([nodes, tasks, str(self.shared / "runs"), [str(RANK), *self.arguments]])
        argv = [sys.executable, "-W", "ignore", str(self.shared / "submit.py"), what]
        done = self.sandbox.exec(argv, cwd=self.shared)
        assert done.returncode == 0, done.stderr
        jobs = json.loads(done.stdout)
        self.others = [Path(folder) for _, folder in jobs[:-1]]
        self.job, folder = jobs[-1]  # of an array the last task: its number is that of the whole array
        self.run_dir = Path(folder)
        line = self.sandbox.exec_command([sys.executable, str(self.shared / "wait.py"), folder], cwd=self.shared)
        self.waiting = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.until("first_step")

    def events(self, kind: str, folder: Path | None = None) -> list[dict[str, Any]]:
        return [event for event in read_events(folder or self.run_dir) if event["event"] == kind]

    def until(self, kind: str, *, count: int = 1, within: float = 200) -> None:
        what = f"{count} x {kind} of job {self.job} (now {self.slurm('JobState')} {self.slurm('Reason')})"
        self.sandbox.wait_for(lambda: len(self.events(kind)) >= count or self.over(), within, what=what)
        assert len(self.events(kind)) >= count, f"the run is over: {self.waiting.communicate()}"

    def over(self) -> bool:
        """The job object says that the run has ended."""
        return self.waiting.poll() is not None

    def slurm(self, name: str) -> str:
        return self.sandbox.job(self.job).get(name, "")

    def nodes(self) -> list[str]:
        from slurm_resilience.slurm.nodeset import expand

        return list(expand(self.slurm("NodeList")))

    def preempt(self, seconds: float = 3) -> None:
        nodes = self.nodes()
        argv = ["sbatch", "--parsable", "--partition=high", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}",
                "--exclusive", "--no-requeue", "--output=/dev/null", f"--wrap=sleep {seconds:g}"]  # fmt: skip
        self.sandbox.exec(argv, cwd=self.shared, check=True)

    def comes_back(self) -> None:
        """In its second life, where it was: at most one checkpoint interval behind."""
        reached = max(event["step"] for event in self.events("checkpoint_committed"))
        before = len(self.events("attempt_started"))
        self.until("first_step", count=before + (0 if len(self.events("first_step")) < before else 1))
        resumed = self.events("resumed")[-1]["step"]
        assert resumed >= reached - EVERY, (resumed, reached)

    def end(self) -> dict[str, Any]:
        """Let it end; what the job object says of it."""
        for folder in (self.run_dir, *self.others):
            (folder / "enough").touch()
        out, err = self.waiting.communicate(timeout=200)
        assert self.waiting.returncode == 0, err
        said: dict[str, Any] = json.loads(out)
        return said


@contextmanager
def watching(sandbox: Sandbox, shared: Path) -> Iterator[None]:
    pid = shared / "watch.pid"
    line = sandbox.exec_command(["bash", "-c", f"echo $$ > {pid}; exec slurm-resilience watch"], new_session=True)
    with open(shared / "watch.log", "w") as log, subprocess.Popen(line, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            sandbox.exec(["kill", "-TERM", pid.read_text().strip()])
            process.wait(timeout=60)


# --- what Slurm does ----------------------------------------------------------------------------------------------------


def preempted(cell: Cell) -> str:
    cell.preempt()
    return "preemption"


def at_its_time_limit(cell: Cell) -> str:
    """An admin cuts it short, since a limit of its own would cost a minute at least."""
    minutes = 1 + int((time.time() - cell.events("allocation_started")[0]["t"]) // 60)
    cell.sandbox.slurm(["scontrol", "update", f"JobId={cell.job}", f"TimeLimit={minutes}"])
    cell.until("requeue_done")
    cell.sandbox.slurm(["scontrol", "update", f"JobId={cell.job}", "TimeLimit=30"], check=False)
    return "time_limit"


def requeued_by_hand(cell: Cell) -> str:
    cell.sandbox.exec(["scontrol", "requeue", cell.job], check=True)
    return "requeued"


def with_the_controller_gone_in_between(cell: Cell) -> str:
    """It knows that the job runs: one that forgets even that starts the job anew, from nothing of ours."""
    saved = cell.sandbox.layout.dir / "slurmctld" / "job_state"
    started = datetime.fromisoformat(cell.slurm("StartTime")).timestamp()
    cell.sandbox.wait_for(lambda: saved.exists() and saved.stat().st_mtime > started, 150, what="slurmctld to save its state")
    cell.preempt()
    cell.until("warning_received")
    cell.sandbox.fault("kill-controller")
    time.sleep(3)
    cell.sandbox.fault("restart-controller")
    return "preemption"


def on_a_node_whose_prolog_fails(cell: Cell) -> str:
    """Not now, but when it comes back: Slurm drains the node and holds the job."""
    cell.sandbox.fault("fail-prolog", cell.nodes()[0])
    cell.sandbox.exec(["scontrol", "requeue", cell.job], check=True)
    return "requeued"


def without_its_batch_host(cell: Cell) -> str:
    cell.sandbox.fault("power-off", cell.slurm("BatchHost"))
    return "node_lost"


def without_another_node(cell: Cell) -> str:
    cell.sandbox.fault("power-off", next(name for name in cell.nodes() if name != cell.slurm("BatchHost")))
    return "node_lost"


USER_SIGNAL = {"SlurmctldParameters": "preempt_send_user_signal"}
SCENARIOS: dict[str, tuple[Callable[[Cell], str], dict[str, str]]] = {
    "grace15": (preempted, {"low.GraceTime": "15"}),
    "grace15-signal": (preempted, {"low.GraceTime": "15", **USER_SIGNAL}),
    "grace0": (preempted, {"low.GraceTime": "0"}),
    "grace0-signal": (preempted, {"low.GraceTime": "0", **USER_SIGNAL}),
    "cancel15": (preempted, {"low.PreemptMode": "CANCEL", "low.GraceTime": "15"}),
    "time-limit": (at_its_time_limit, {}),
    "requeue": (requeued_by_hand, {}),
    "controller": (with_the_controller_gone_in_between, {}),
    "prolog": (on_a_node_whose_prolog_fails, {}),
    "batch-host": (without_its_batch_host, {"SlurmdTimeout": "15"}),
    # until Slurm knows that the node is gone, the job stays COMPLETING
    "other-node": (without_another_node, {"SlurmdTimeout": "15"}),
}
ALWAYS = {("grace0-signal", "one")}
CELLS = [
    pytest.param(scenario, shape, marks=[] if (scenario, shape) in ALWAYS else pytest.mark.long)
    for scenario in SCENARIOS
    for shape in SHAPES
    if not (scenario == "other-node" and shape != "four")  # they have no other
]


@pytest.mark.parametrize(("scenario", "shape"), CELLS)
def test_it_comes_back(sandbox: Sandbox, shared: Path, revivals: int, scenario: str, shape: str) -> None:
    """submitit#1617 (grace0-signal), Lightning#20542 (time-limit), aws-parallelcluster#1671 (batch-host)."""
    act, settings = SCENARIOS[scenario]
    if settings:
        Sandbox.up(nodes=4, name=sandbox.layout.name, settings=settings)
    with watching(sandbox, shared):
        cell = Cell(sandbox, shared, shape)
        cell.until("checkpoint_committed", count=2)
        cause = act(cell)
        cell.comes_back()
        restarts = cell.slurm("Restarts")
        said = cell.end()
    # Slurm's word; a Slurm that remembers the preemption to the end, and may not requeue the job for it, says so
    state = "PREEMPTED" if scenario == "cancel15" and revivals else "COMPLETED"
    assert (said["state"], said["cause"], said["exit_code"]) == (state, None, 0), said
    assert said["attempts"][0].get("cause") == cause, said["attempts"]
    if scenario not in ("other-node", "batch-host"):
        assert restarts == ("2" if scenario == "prolog" else "1")
        more = {revivals if scenario in ("grace15", "grace15-signal") else 0}
        if scenario == "controller":  # killed, it may have forgotten that there was a preemption
            more.add(revivals)
        assert int(cell.slurm("Restarts")) - int(restarts) in more
    for other in cell.others:
        assert len(cell.events("attempt_started", other)) == 1, "the other task of the array was left alone"
        assert cell.events("run_completed", other)
    drained = {name: state for name, state in sandbox.node_states().items() if "DRAIN" in state}
    assert len(drained) == (1 if scenario == "prolog" else 0), drained


@pytest.mark.parametrize(
    "shape", ["one", pytest.param("four", marks=pytest.mark.long), pytest.param("task", marks=pytest.mark.long)]
)
def test_cancelled_it_does_not(sandbox: Sandbox, shared: Path, shape: str) -> None:
    cell = Cell(sandbox, shared, shape)
    cell.until("checkpoint_committed")
    sandbox.exec(["scancel", cell.job], check=True)
    out, err = cell.waiting.communicate(timeout=120)
    assert cell.waiting.returncode == 0, err
    said = json.loads(out)
    assert (said["state"], said["cause"]) == ("CANCELLED", "cancelled"), said
    assert cell.slurm("Restarts") == "0"
    assert not cell.events("requeue_started")
    for other in cell.others:
        assert not cell.events("warning_received", other), "the other task of the array was left alone"
        (other / "enough").touch()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_preempted_once_and_broken_later_it_ends_with_its_code(sandbox: Sandbox, shared: Path, revivals: int) -> None:
    """Where Slurm requeues it after that, nothing is trained again, and nobody else's nodes are waited for."""
    cell = Cell(sandbox, shared, "four")
    cell.until("checkpoint_committed", count=2)
    cell.preempt()
    cell.comes_back()
    (cell.run_dir / "rotten").touch()
    out, err = cell.waiting.communicate(timeout=200)
    assert cell.waiting.returncode == 0, err
    said = json.loads(out)
    assert (said["state"], said["cause"], said["exit_code"]) == ("FAILED", "app_error", int(ExitCode.APP_ERROR)), said
    assert cell.slurm("Restarts") == str(1 + revivals)
    assert not revivals or cell.slurm("NumNodes") == "1"
    assert len(cell.events("run_failed")) == 1
    assert max(event["restart"] for event in cell.events("attempt_started")) == 1
