"""Failures that people have met with other launchers, made to happen here: each test names the report."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.sandbox import Sandbox
from tests.slurm.test_matrix import RANK, Cell, watching

ROOT = Path(__file__).parent.parent.parent
# scontrol as a site has it that lets nobody requeue a job, nor allow it.
NO_REQUEUE = """#!/bin/bash
case " $* " in
  *" requeuehold "* | *" requeue "* | *Requeue=1*) echo "Requested operation is presently disabled" >&2; exit 1 ;;
esac
exec {scontrol} "$@"
"""
# What the supervisor finds on its PATH where there is no scontrol.
OTHERS = ("bash", "cat", "env", "hostname", "id", "mkdir", "python", "python3", "sed", "sh", "srun", "uname")


@pytest.mark.long
def test_where_slurm_refuses_every_requeue_the_run_goes_on_in_a_new_job(sandbox: Sandbox, shared: Path) -> None:
    """MFC#1771: preempted, and the site lets no job come back.  The same script, folder and run id, and another job."""
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"low.GraceTime": "30"})
    shim = shared / "shim" / "scontrol"
    shim.parent.mkdir()
    shim.write_text(NO_REQUEUE.format(scontrol=_real(sandbox, "scontrol")))
    shim.chmod(0o755)
    cell = Cell(sandbox, shared, "one", setup=[f'export PATH={shim.parent}:"$PATH"'])
    cell.until("checkpoint_committed", count=2)
    run_id = json.loads((cell.run_dir / "job.json").read_text())["run_id"]
    cell.preempt()
    cell.comes_back()
    said = cell.end()
    assert (said["state"], said["cause"], said["exit_code"]) == ("COMPLETED", None, 0), said
    job = json.loads((cell.run_dir / "job.json").read_text())
    assert (job["earlier_job_ids"], job["run_id"]) == ([cell.job], run_id)
    assert job["job_id"] != cell.job
    assert cell.events("requeue_done")[-1]["action"] == "resubmitted"
    assert sandbox.job(job["job_id"])["Restarts"] == "0"


@pytest.mark.long
def test_without_scontrol_on_the_node(sandbox: Sandbox, shared: Path) -> None:
    """submitit#1601, Lightning#21404, pyxis#129: told at the start, and the batch script puts the job back."""
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"low.GraceTime": "15"})
    slim = _slim(shared)
    with watching(sandbox, shared):
        cell = Cell(sandbox, shared, "one", setup=[f'resilience=(/usr/bin/env PATH={slim} "${{resilience[@]}}")'])
        log = (cell.run_dir / "logs" / f"job-{cell.job}.out").read_text()
        assert "Slurm cannot be asked from here" in log
        assert "puts the job back" in log
        cell.until("checkpoint_committed", count=2)
        cell.preempt()
        cell.comes_back()
        said = cell.end()
    assert (said["state"], said["exit_code"]) == ("COMPLETED", 0), said
    assert cell.slurm("Restarts") == "1"


@pytest.mark.long
def test_without_scontrol_a_cancelled_job_stays_cancelled(sandbox: Sandbox, shared: Path) -> None:
    slim = _slim(shared)
    cell = Cell(sandbox, shared, "one", setup=[f'resilience=(/usr/bin/env PATH={slim} "${{resilience[@]}}")'])
    cell.until("checkpoint_committed")
    sandbox.exec(["scancel", cell.job], check=True)
    sandbox.wait_for(lambda: cell.slurm("JobState") == "CANCELLED", 150, what="The end of the job")
    assert cell.slurm("Restarts") == "0"


@pytest.mark.long
@pytest.mark.parametrize("cancelled", [False, True])
def test_without_scontrol_and_our_script_the_exit_code_is_enough(sandbox: Sandbox, shared: Path, cancelled: bool) -> None:
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"RequeueExit": "75", "low.GraceTime": "30"})
    run = shared / "run"
    words = f"/usr/bin/env PATH={_slim(shared)} {sys.executable} -m slurm_resilience run --run-dir {run} --preload '' --"
    argv = ["sbatch", "--parsable", "--requeue", "--nodelist=n1", "--partition=low", "--time=30", f"--output={shared}/out",
            "--comment=resilient", f"--wrap=trap '' TERM CONT; {words} {sys.executable} {RANK}"]  # fmt: skip
    with watching(sandbox, shared):
        job = sandbox.exec(argv, cwd=shared, check=True).stdout.strip()
        sandbox.wait_for(lambda: _events(run, "checkpoint_committed"), 120, what="A checkpoint")
        assert "Slurm requeues what ends with code 75" in (shared / "out").read_text()
        if cancelled:
            sandbox.exec(["scancel", job], check=True)
            sandbox.wait_for(lambda: sandbox.job_state(job) == "CANCELLED", 150, what="The end of the job")
            assert sandbox.job(job)["Restarts"] == "0"
            return
        sandbox.exec(["scancel", "--full", "--signal=TERM", job], check=True)
        sandbox.wait_for(lambda: len(_events(run, "first_step")) == 2, 250, what=f"Its second life ({sandbox.job_state(job)})")
        (run / "enough").touch()
        sandbox.wait_for(lambda: _events(run, "run_completed"), 150, what="The end")


@pytest.mark.long
def test_a_users_signal_to_all_steps_saves_and_goes_on(sandbox: Sandbox, shared: Path) -> None:
    """pytorch#154849: USR1 and USR2 killed torchrun before its ranks could save."""
    cell = Cell(sandbox, shared, "four")
    cell.until("checkpoint_committed")
    for number, name in enumerate(("USR1", "USR2"), start=1):
        before = [event["step"] for event in cell.events("checkpoint_committed")]
        sandbox.exec(["scancel", f"--signal={name}", cell.job], check=True)
        sandbox.wait_for(
            lambda before=before: any(
                event["step"] > before[-1] and event["step"] % 20 for event in cell.events("checkpoint_committed")
            ),
            150,
            what=f"A checkpoint for {name}",
        )
        assert len(cell.events("warning_received")) == number
    said = cell.end()
    assert (said["state"], len(said["attempts"])) == ("COMPLETED", 1), said


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_signal_for_the_batch_shell_alone(sandbox: Sandbox, shared: Path) -> None:
    """accelerate#3400: `--signal=B:…` reaches no rank.  They save all the same, and the job comes back."""
    argv = ["sbatch", "--parsable", "--signal=B:USR2@60", "--time=3", "--nodes=1", "--partition=low",
            f"--output={shared}/out", f"{ROOT}/sbatch/resilient.sbatch", sys.executable, str(RANK)]  # fmt: skip
    job = sandbox.exec(argv, cwd=shared, check=True).stdout.strip()
    run = shared / "resilience-runs" / f"job-{job}"
    sandbox.wait_for(lambda: _events(run, "requeue_done"), 240, what="The requeue")
    sandbox.slurm(["scontrol", "update", f"JobId={job}", "TimeLimit=30"], check=False)
    assert [event["cause"] for event in _events(run, "warning_explained")] == ["time_limit"]
    assert _events(run, "attempt_stopped")[-1]["saved"] is True
    assert sandbox.slurm(["sacct", "-nPXD", "-j", job, "-o", "State"]).stdout.splitlines()[0] != "TIMEOUT"
    sandbox.wait_for(lambda: len(_events(run, "first_step")) == 2, 200, what="Its second life")
    (run / "enough").touch()
    sandbox.wait_for(lambda: _events(run, "run_completed"), 150, what="The end")


@pytest.mark.long
def test_a_bad_node_is_left_and_not_taken_again(sandbox: Sandbox, shared: Path) -> None:
    """SchedMD/slurm PR#209, spur#538: requeued to the same bad node for ever."""
    cell = Cell(sandbox, shared, "one", config={"spares": 1}, arguments=["kill-here"])
    (bad,) = cell.events("attempt_started")[0]["nodes"]
    cell.until("checkpoint_committed", count=1)
    crashes = [event for event in cell.events("fault_detected") if event["node"] == bad]
    assert 2 <= len(crashes) <= 3
    assert cell.events("attempt_started")[-1]["nodes"] != [bad]
    sandbox.exec(["scontrol", "requeue", cell.job], check=True)
    cell.until("requeue_done")
    assert cell.events("requeue_done")[-1]["excluded"] == [bad]
    cell.comes_back()
    assert bad not in cell.events("attempt_started")[-1]["nodes"]
    assert cell.end()["state"] == "COMPLETED"


EVALUATING = """
import pathlib, sys, time, torch
from slurm_resilience import Run
run = Run()
model = torch.nn.Linear(1, 1)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
run.resume()
for step in run.steps(1 << 20):
    run.report(loss=0.0)
    if step == 3 and run.attempt == 1:
        with run.section("eval", limit=None):
            pathlib.Path(sys.argv[1]).touch()
            for _ in range(4000):
                time.sleep(0.01)
                if sys.argv[2] == "asks" and run.should_stop():
                    break
    if run.attempt > 1:
        run.finish()
        break
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_long_evaluation_is_left_in_time_by_who_asks(sandbox: Sandbox, shared: Path) -> None:
    """spd#740.  Who does not ask is told of, is gone before Slurm has to kill, and comes back."""
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings={"low.GraceTime": "15"})
    (shared / "evaluating.py").write_text(EVALUATING)
    runs, jobs = {}, {}
    for how in ("asks", "does-not"):
        runs[how] = shared / "runs" / how
        words = ["slurm-resilience", "submit", "--run-dir", str(runs[how]), "--partition", "low", "--exclusive", "--time", "30",
                 "--preload", "torch", "--", sys.executable, str(shared / "evaluating.py"), str(shared / how), how]  # fmt: skip
        jobs[how] = sandbox.exec(words, cwd=shared, check=True).stdout.split()[-1]
    for how, job in jobs.items():
        sandbox.wait_for((shared / how).exists, 200, what=f"The evaluation of {how} ({sandbox.job_state(job)})")
    high = ["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"]
    sandbox.exec(high, cwd=shared, check=True)
    for how, run in runs.items():
        sandbox.wait_for(lambda run=run: _events(run, "requeue_done"), 120, what=f"The requeue of {how}")
    assert _events(runs["asks"], "attempt_stopped")[-1]["saved"] is True
    assert not _events(runs["asks"], "stop_not_heard")
    assert _events(runs["does-not"], "attempt_stopped")[-1]["saved"] is False
    (told,) = _events(runs["does-not"], "stop_not_heard")
    assert told["section"] == "eval"
    for how, run in runs.items():
        sandbox.wait_for(lambda run=run: _events(run, "run_completed"), 250, what=f"The end of {how}")
    assert not any("DRAIN" in state for state in sandbox.node_states().values())


RENDEZVOUS = """
import json, os, pathlib, sys
from slurm_resilience import Run
run = Run()
run.init_process_group()
names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RESILIENCE_ATTEMPT")
place = pathlib.Path(sys.argv[1]) / f"met.{run.attempt}.{run.rank}"
place.write_text(json.dumps([run.world_size, *[os.environ.get(name) for name in names]]))
if run.attempt == 1:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.long
def test_attempts_do_not_meet_in_the_same_rendezvous(sandbox: Sandbox, shared: Path) -> None:
    """submitit#1613: leftovers of the attempt before were counted (world_size=8, worker_count=16)."""
    (shared / "meeting.py").write_text(RENDEZVOUS)
    words = ["slurm-resilience", "submit", "--run-dir", str(shared / "run"), "--nodes", "2", "--exclusive", "--time", "10",
             "--wait", "--preload", "torch", "--", sys.executable, str(shared / "meeting.py"), str(shared)]  # fmt: skip
    done = sandbox.exec(words, cwd=shared, timeout=280)
    assert done.returncode == 0, done.stderr
    met = {path.name: json.loads(path.read_text()) for path in shared.glob("met.*")}
    last = max(int(name.split(".")[1]) for name in met)
    first, second = met["met.1.0"], met[f"met.{last}.0"]
    assert (first[0], second[0]) == (2, 2)
    assert first[4] != second[4], "torch's own prefix of keys in the store is this number"
    assert first[1:3] != second[1:3], "each attempt has a store of its own"
    status = RunFolder(shared / "run").status()
    assert status is not None
    assert status.state == "complete"


@pytest.mark.long
def test_a_heterogeneous_job_is_refused_in_words(sandbox: Sandbox, shared: Path) -> None:
    wrap = f"--wrap=slurm-resilience run --run-dir {shared}/run -- {sys.executable} {RANK}"
    argv = ["sbatch", "--parsable", "--wait", "--nodes=1", f"--output={shared}/out", wrap, ":", "--nodes=1"]
    done = sandbox.exec(argv, cwd=shared, timeout=200)
    assert done.returncode == 78, done.stderr
    assert "heterogeneous, with 2 components" in (shared / "out").read_text()
    job = done.stdout.split()[0].partition(";")[0]
    other = sandbox.exec(["slurm-resilience", "requeue", f"{job}+1"])
    assert other.returncode != 0
    assert "Traceback" not in other.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_maintenance_is_left_before_it_begins(sandbox: Sandbox, shared: Path) -> None:
    cell = Cell(sandbox, shared, "one")
    cell.until("checkpoint_committed")
    argv = ["scontrol", "create", "reservation", "ReservationName=repair", "StartTime=now+3minutes", "Duration=60",
            "Users=root", "Nodes=ALL", "Flags=MAINT,IGNORE_JOBS"]  # fmt: skip
    sandbox.slurm(argv)
    try:
        cell.until("requeue_done", within=240)
        assert cell.events("warning_explained")[-1]["cause"] == "node_drained"
        assert "repair" in cell.events("warning_explained")[-1]["detail"]
        assert cell.events("attempt_stopped")[-1]["saved"] is True
        sandbox.wait_for(lambda: cell.slurm("JobState") == "PENDING", 150, what="The job in the queue")
    finally:
        sandbox.slurm(["scontrol", "delete", "ReservationName=repair"])
    with watching(sandbox, shared):
        cell.comes_back()
        assert cell.end()["state"] == "COMPLETED"


def _slim(shared: Path) -> Path:
    """A PATH without scontrol."""
    slim = shared / "slim"
    slim.mkdir()
    for name in OTHERS:
        if path := shutil.which(name):
            (slim / name).symlink_to(os.path.realpath(path))
    return slim


def _events(run_dir: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


def _real(sandbox: Sandbox, name: str) -> str:
    return sandbox.exec(["bash", "-c", f"command -v {name}"], check=True).stdout.strip()
