"""Both doors into a real Slurm, Python and sbatch, as the ordinary user; and what the job object says until the end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.sandbox import Sandbox

ROOT = Path(__file__).parent.parent.parent
MINIMAL = ROOT / "examples" / "minimal.py"

# What alice writes: a function of hers, and a way to submit it.
DRIVER = """
import json, os, sys, time
from pathlib import Path
from slurm_resilience import ResilientJob, map_resilient, submit_resilient

def train(run, folder, factor=1):
    import torch
    from pathlib import Path
    run.init_process_group()
    model = torch.nn.Linear(2, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    run.resume()
    started = run.step
    (Path(folder) / f"started.{run.attempt}.{run.rank}").write_text(str(started))
    for step in run.steps(1_000_000):
        time.sleep(0.02)
        run.report(loss=1.0 / (step + 1))
        if run.sum(float((Path(folder) / "enough").exists())):
            run.finish()
            break
    return {"attempt": run.attempt, "world": run.world_size, "times": factor * 2}

def small(run, number):
    return number + run.world_size * 0

def broken(run):
    raise ValueError("the data is rotten")

def say(**what):
    print(json.dumps(what))
"""


@pytest.fixture
def alice(sandbox: Sandbox, shared: Path) -> Any:
    """Run lines of Python as alice, after DRIVER; what they ``say`` last is returned."""
    (shared / "driver.py").write_text(DRIVER)

    def run(code: str, *, within: float = 200) -> dict[str, Any]:
        script = f"import sys; sys.path.insert(0, {str(shared)!r})\nfrom driver import *\nshared = {str(shared)!r}\n{code}\n"
        (shared / "lines.py").write_text(script)
        done = sandbox.exec([sys.executable, "-W", "ignore", str(shared / "lines.py")], cwd=shared, timeout=within)
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return said

    return run


def submitted(alice: Any, nodes: str = "(1, 2)") -> tuple[str, Path]:
    said = alice(
        f"job = submit_resilient(train, shared, kwargs={{'factor': 21}}, nodes={nodes}, folder=shared + '/runs', "
        "timeout_min=30, partition='low', exclusive=True, config={'checkpoint': {'every_steps': 20}})\n"
        "say(job=job.job_id, run_dir=str(job.run_dir), state=job.state, done=job.done())"
    )
    assert not said["done"]
    return said["job"], Path(said["run_dir"])


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


ENDED = """
from slurm_resilience.submit import JobFailed
job = ResilientJob.from_dir({run_dir!r})
over = job.wait(timeout={within})
failure = job.exception() if over else None
say(over=over, state=job.state, result=None if failure or not over else job.result(), exit_code=job.exit_code,
    cause=failure and failure.cause.value, failure=failure and str(failure), attempts=job.attempts,
    stdout=job.stdout(), stderr=job.stderr())
"""


def ended(alice: Any, run_dir: Path, within: float = 150) -> dict[str, Any]:
    said: dict[str, Any] = alice(ENDED.format(run_dir=str(run_dir), within=within), within=within + 60)
    return said


def test_a_function_comes_back_with_its_result(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    job, run_dir = submitted(alice)
    sandbox.wait_for(lambda: events(run_dir, "first_step"), 120, what="The first step")
    (shared / "enough").touch()
    end = ended(alice, run_dir)
    assert end["over"]
    assert (end["state"], end["exit_code"]) == ("COMPLETED", 0)
    assert end["result"] == {"attempt": 1, "world": 2, "times": 42}
    assert len(end["attempts"]) == 1
    assert sandbox.job(job)["NumNodes"] == "2", "as many nodes as there are, up to the most"
    assert "run complete" in end["stderr"]


def test_preempted_it_comes_back_and_the_object_waits(sandbox: Sandbox, shared: Path, alice: Any, revivals: int) -> None:
    """Lightning#4265: in the folder that was fixed when it was submitted."""
    job, run_dir = submitted(alice)
    sandbox.wait_for(lambda: events(run_dir, "checkpoint_committed"), 120, what="A checkpoint")
    sandbox.fault("preempt", seconds=5.0)
    sandbox.wait_for(lambda: events(run_dir, "requeue_done"), 120, what="The requeue")
    assert alice(f"job = ResilientJob.from_dir({str(run_dir)!r}); say(done=job.done(), state=job.state)")["done"] is False
    sandbox.wait_for(lambda: len(events(run_dir, "first_step")) >= 2, 200, what="The second life of the job")
    assert sandbox.job(job)["Restarts"] == "1"
    (shared / "enough").touch()
    sandbox.wait_for(lambda: events(run_dir, "run_completed"), 150, what="The end of the run")
    over = time.time()
    end = ended(alice, run_dir)
    assert end["result"] is not None, end["failure"]
    assert end["result"]["attempt"] == 2
    assert end["state"] == "COMPLETED"
    assert time.time() - over < 100, "not the 121 s of Slurm's own requeue, where it makes one more"
    record = sandbox.job(job)
    assert record["Restarts"] == str(1 + revivals)
    assert not revivals or record["NumNodes"] == "1"
    assert len(events(run_dir, "attempt_started")) == 2
    assert int((shared / "started.2.0").read_text()) > 0, "it went on where it was"
    assert end["attempts"][1]["restart"] == 1


def test_cancelled_it_stays_cancelled(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    job, run_dir = submitted(alice)
    sandbox.wait_for(lambda: events(run_dir, "first_step"), 120, what="The first step")
    alice(f"ResilientJob.from_dir({str(run_dir)!r}).cancel(); say()")
    end = ended(alice, run_dir)
    assert end["over"]
    assert (end["state"], end["cause"]) == ("CANCELLED", "cancelled"), end["failure"]
    assert sandbox.job(job)["Restarts"] == "0"
    assert not events(run_dir, "requeue_started")


def test_a_killed_supervisor_is_replaced_by_the_script(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    job, run_dir = submitted(alice, nodes="1")
    sandbox.wait_for(lambda: events(run_dir, "first_step"), 120, what="The first step")
    sandbox.fault("kill-supervisor", job=job)
    sandbox.wait_for(lambda: events(run_dir, "supervisor_restarted"), 150, what="Its successor")
    (shared / "enough").touch()
    end = ended(alice, run_dir)
    assert end["state"] == "COMPLETED", end["failure"]
    assert "was killed (code 137), death 1 of" in end["stderr"]


def test_an_exception_of_the_users_is_told_in_full(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    said = alice("job = submit_resilient(broken, folder=shared + '/runs', partition='low'); say(run_dir=str(job.run_dir))")
    end = ended(alice, Path(said["run_dir"]))
    assert end["state"] == "FAILED"
    assert end["cause"] == "app_error"
    assert end["exit_code"] == 80, "the table of exit codes reaches Slurm"
    assert "ValueError: the data is rotten" in end["failure"]
    assert "the data is rotten" in end["stdout"]


@pytest.mark.parametrize("name", ["it's 100%j; ü $x", 'a "b" #c'])
def test_a_folder_with_an_odd_name_works(sandbox: Sandbox, shared: Path, alice: Any, name: str) -> None:
    said = alice(
        f"job = submit_resilient(small, 7, folder=shared + '/' + {name!r}, partition='low'); say(run_dir=str(job.run_dir))"
    )
    end = ended(alice, Path(said["run_dir"]))
    assert end["result"] == 7, end
    assert "run complete" in end["stderr"]


def test_without_accounting(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    sandbox.fault("break-scontrol", command="sacct", how="fail")
    said = alice("job = submit_resilient(small, 7, folder=shared + '/runs', partition='low'); say(run_dir=str(job.run_dir))")
    end = ended(alice, Path(said["run_dir"]))
    assert (end["state"], end["result"]) == ("COMPLETED", 7)


def test_a_controller_that_does_not_answer_ends_nothing(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    _, run_dir = submitted(alice, nodes="1")
    sandbox.fault("break-scontrol", how="fail")
    seen = alice(f"job = ResilientJob.from_dir({str(run_dir)!r}); say(done=job.done(), state=job.state)")
    assert seen == {"done": False, "state": "UNKNOWN"}


def test_from_inside_a_job(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    """Nothing of the surrounding job's sizes reaches the new one.  spd#955."""
    (shared / "driver.py").write_text(DRIVER)
    (shared / "inner.py").write_text(
        f"import sys; sys.path.insert(0, {str(shared)!r})\nfrom driver import *\n"
        "def look(run):\n    return {name: os.environ.get(name) for name in ('SLURM_JOB_NUM_NODES', 'SLURM_NTASKS', 'OUTER')}\n"
        f"job = submit_resilient(look, nodes=1, folder={str(shared / 'runs')!r}, partition='low')\nprint(job.run_dir)\n"
    )
    argv = [
        "sbatch",
        "--parsable",
        "--wait",
        "-N2",
        "-n4",
        f"--output={shared}/outer",
        f"--wrap=python -W ignore {shared}/inner.py",
    ]
    sandbox.exec(argv, cwd=shared, env={"OUTER": "kept"}, timeout=120, check=True)
    end = ended(alice, Path((shared / "outer").read_text().strip().splitlines()[-1]))
    assert end["result"] == {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1", "OUTER": "kept"}, end


CLASSIC = """
import submitit
from submitit.core.utils import DelayedSubmission

class Counting:
    def __init__(self, before=0):
        self.before, self.turns = before, 0
    def __call__(self, folder, value):
        Path(folder, f"begun.{value}.{self.before}").touch()
        while not Path(folder, "enough").exists():
            self.turns += 1
            time.sleep(0.02)
        environment = submitit.JobEnvironment()
        return [value, self.before > 0, environment.job_id, environment.global_rank, environment.num_tasks]
    def checkpoint(self, folder, value):
        return DelayedSubmission(Counting(self.before + self.turns), folder, value)
"""


def test_submitits_checkpointable_in_an_array(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    """One task is preempted: it alone comes back, with the state that it gave when it was told to stop.  Lightning#15022."""
    (shared / "driver.py").write_text(DRIVER + CLASSIC)
    said = alice(
        "jobs = map_resilient(Counting(), [shared] * 2, [5, 6], folder=shared + '/runs', partition='low', exclusive=True,\n"
        "                     timeout_min=30, config={'preload': []})\n"
        "say(jobs=[[job.job_id, str(job.run_dir)] for job in jobs])"
    )
    (first, first_dir), (hit, hit_dir) = said["jobs"]
    assert (first.partition("_")[2], hit.partition("_")[2]) == ("0", "1")
    for value in (5, 6):
        sandbox.wait_for((shared / f"begun.{value}.0").exists, 120, what=f"The task of {value}")
    high = ["sbatch", "--partition=high", f"--nodelist={sandbox.job(hit)['NodeList']}", "--exclusive", "--output=/dev/null"]
    sandbox.exec([*high, "--wrap=sleep 3"], cwd=shared, check=True)
    sandbox.wait_for(lambda: len(list(shared.glob("begun.6.*"))) == 2, 200, what="Its second life")
    (shared / "enough").touch()
    ends = [ended(alice, Path(folder)) for folder in (first_dir, hit_dir)]
    assert [end["result"] for end in ends] == [[5, False, first, 0, 1], [6, True, hit, 0, 1]], ends
    assert len(events(Path(first_dir), "attempt_started")) == 1, "the other task was left alone"
    assert events(Path(hit_dir), "requeue_done")


def test_refused_by_slurm(sandbox: Sandbox, shared: Path, alice: Any) -> None:
    said = alice(
        "from slurm_resilience.errors import SubmitError\n"
        "try: submit_resilient(small, 7, folder=shared + '/runs', partition='nope')\n"
        "except SubmitError as error: say(error=str(error), left=os.listdir(shared + '/runs'))"
    )
    assert "invalid partition specified: nope" in said["error"]
    assert said["left"] == []


def test_the_template_as_it_is(sandbox: Sandbox, shared: Path) -> None:
    argv = ["sbatch", "--parsable", "--time=10", f"{ROOT}/sbatch/resilient.sbatch", "python", str(MINIMAL)]
    job = sandbox.exec(argv, cwd=shared, check=True).stdout.strip()
    run = RunFolder(shared / "resilience-runs" / f"job-{job}")
    sandbox.wait_for(lambda: sandbox.job_state(job) in ("COMPLETED", "FAILED"), 200, what="The end of the job")
    log = (shared / f"resilient-{job}.out").read_text()
    assert sandbox.job_state(job) == "COMPLETED", log
    status = run.status()
    assert status is not None
    assert (status.state, status.step) == ("complete", 200), log
    assert len(events(run.path, "attempt_started")[0]["nodes"]) == 4


def test_one_task_of_an_array_is_preempted_alone(sandbox: Sandbox, shared: Path, revivals: int) -> None:
    (shared / "driver.py").write_text(DRIVER)
    (shared / "script.py").write_text(
        f"from driver import train\nfrom slurm_resilience import Run\nprint(train(Run(), {str(shared)!r}))\n"
    )
    argv = ["sbatch", "--parsable", "--array=1-2", "--nodes=1", "--partition=low", "--time=20", "--output=%x-%a.out",
            f"{ROOT}/sbatch/resilient.sbatch", "python", str(shared / "script.py")]  # fmt: skip
    array = sandbox.exec(argv, cwd=shared, check=True).stdout.strip()
    runs = {task: RunFolder(shared / "resilience-runs" / f"job-{array}_{task}") for task in (1, 2)}
    for run in runs.values():
        sandbox.wait_for(lambda run=run: events(run.path, "first_step"), 120, what=f"The first step in {run.path}")
    hit, other = 2, 1  # the last task: the number of its job is that of the whole array
    assert sandbox.job(f"{array}_{hit}")["JobId"] == array
    node = sandbox.job(f"{array}_{hit}")["NodeList"]
    high = ["sbatch", "--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    sandbox.exec(high, cwd=shared, check=True)
    sandbox.wait_for(lambda: len(events(runs[hit].path, "first_step")) == 2, 200, what="Its second life")
    restarts = {task: sandbox.job(f"{array}_{task}")["Restarts"] for task in runs}
    assert restarts == {hit: "1", other: "0"}
    (shared / "enough").touch()
    for task, run in runs.items():
        sandbox.wait_for(lambda run=run: events(run.path, "run_completed"), 150, what=f"The end of task {task}")
    for task in runs:
        sandbox.wait_for(lambda task=task: sandbox.job_state(f"{array}_{task}") == "COMPLETED", 100, what=f"The end of {task}")
    restarts = {task: sandbox.job(f"{array}_{task}")["Restarts"] for task in runs}
    assert restarts == {hit: str(1 + revivals), other: "0"}
    assert len(events(runs[other].path, "attempt_started")) == 1


def test_the_command_line(sandbox: Sandbox, shared: Path) -> None:
    words = ["slurm-resilience", "submit", "--nodes", "1-2", "--partition", "low", "--exclusive", "--time", "10"]
    words += ["--checkpoint-every", "50", "--folder", str(shared / "runs"), "--job-name", "mini"]
    words += ["--json", "--wait", "--", "python", str(MINIMAL)]
    done = sandbox.exec(words, cwd=shared, timeout=250)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["run_dir"]).name.startswith("mini-")
    assert said["run_id"] != said["job_id"]
    status = RunFolder(said["run_dir"]).status()
    assert status is not None
    assert (status.state, status.step) == ("complete", 200)
    shown = sandbox.job(said["job_id"])
    assert shown["JobName"] == "mini"
    assert shown["Restarts"] == "0"
    dry = sandbox.exec([*words[:-5], "--dry-run", "--", "python", "x.py"], cwd=shared)
    assert dry.stdout.startswith("#!/bin/bash\n")
    assert len(list((shared / "runs").iterdir())) == 1, "a dry run makes nothing"
    wrong = sandbox.exec(["slurm-resilience", "submit", "--partiton", "low", "--", "python"], cwd=shared)
    assert wrong.returncode == 64
    assert "did you mean '--partition'" in wrong.stderr


@pytest.mark.long
def test_with_a_snapshot_a_later_attempt_runs_what_the_first_one_ran(sandbox: Sandbox, shared: Path) -> None:
    project, run_dir = shared / "project", shared / "runs" / "mine"
    project.mkdir()
    (project / "helper.py").write_text("WORD = 'as it was'\n")
    train = (
        (ROOT / "tests" / "slurm" / "cheap_rank.py")
        .read_text()
        .replace("def main() -> None:", "def main() -> None:\n    print(helper.WORD)")
    )
    (project / "train.py").write_text(train.replace("import json\n", "import helper, json\n", 1))
    words = ["slurm-resilience", "submit", "--snapshot", "--run-dir", str(run_dir), "--partition", "low", "--time", "30"]
    done = sandbox.exec([*words, "--preload", "", "--", "python", "train.py"], cwd=project)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    sandbox.wait_for(lambda: events(run_dir, "checkpoint_committed"), 120, what="A checkpoint")
    second = sandbox.exec([*words, "--", "python", "train.py"], cwd=project)
    assert second.returncode == 78, "a run is one job at a time"
    assert f"has a job in Slurm already, {job}, " in second.stderr
    (project / "helper.py").write_text("raise SystemExit('edited since')\n")
    (project / "train.py").unlink()
    moved = sandbox.exec(["slurm-resilience", "requeue", job], timeout=250)
    assert moved.returncode == 0, moved.stdout + moved.stderr
    sandbox.wait_for(lambda: len(events(run_dir, "first_step")) == 2, 200, what="Its second life")
    sandbox.exec(["scontrol", "requeue", job], check=True)
    sandbox.wait_for(lambda: len(events(run_dir, "first_step")) == 3, 200, what="Its third life")
    (run_dir / "enough").touch()
    sandbox.wait_for(lambda: events(run_dir, "run_completed"), 150, what="The end")
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("attempt-*/rank-*.log"))
    assert logs.count("as it was") == 3
    by_hand = ["moved by `slurm-resilience requeue`", "by `scontrol requeue`, of its user or an admin"]
    for name in ("warning_explained", "decided"):  # the attempt may have stopped before Slurm has answered
        told = [event for event in events(run_dir, name) if "by_hand" in event]
        assert [(event["cause"], event["by_hand"]) for event in told] == [("unknown", who) for who in by_hand], name
    shown = sandbox.exec(["slurm-resilience", "status", str(run_dir)], cwd=shared).stdout
    assert "the last of 2 times: by `scontrol requeue`" in " ".join(shown.split())
