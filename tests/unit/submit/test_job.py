"""What the job object says: never too early, never from another job's record, and right in the end."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience._clock import boot_id
from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.observe.events import EventWriter
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.slurm.client import AccountingRecord, CommandClient
from slurm_resilience.slurm.failures import CommandMissing, CommandTimeout, ControllerUnreachable, NoSuchJob
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState
from slurm_resilience.submit import job as job_module
from slurm_resilience.submit.handles import LocalHandle, Look, SlurmHandle, process_started
from slurm_resilience.submit.job import JobFailed, ResilientJob
from slurm_resilience.submit.payload import CallFolder, Result
from tests.unit.slurm.recordings import job as recorded

SCRIPT = "train-1/call/submission.sh"


class Slurm(CommandClient):
    """Answers about one job: a record or an error, and a history or an error."""

    def __init__(self, record: JobRecord | SlurmError, history: list[AccountingRecord] | SlurmError | None = None) -> None:
        super().__init__()
        self.record, self.runs = record, history if history is not None else []

    def job(self, job_id: str) -> JobRecord:
        if isinstance(self.record, SlurmError):
            raise self.record
        return self.record

    def history(self, job_id: str) -> list[AccountingRecord]:
        if isinstance(self.runs, SlurmError):
            raise self.runs
        return self.runs


def ours(name: str = "job-running.txt", **changes: Any) -> JobRecord:
    return dataclasses.replace(recorded(name), **{"command": f"/home/alice/runs/{SCRIPT}", **changes})


def entry(state: JobState, at: float = 2000.0, code: int = 0) -> AccountingRecord:
    return AccountingRecord("32", state, None, code, 0, at, at, at + 10)


def look(run: RunFolder, slurm: Slurm) -> Look:
    return SlurmHandle("32", script=SCRIPT, submitted_at=1990.0, run=run, client=slurm).look()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "train-1")
    folder.prepare()
    (folder.path / "call").mkdir()
    return folder


@pytest.mark.parametrize(
    "name", ["job-running.txt", "job-preempted-grace.txt", "job-requeued-completing.txt", "job-requeued-pending.txt",
             "job-cancelled-completing.txt", "job-timelimit-completing.txt", "job-held.txt"],
)  # fmt: skip
def test_not_yet(run: RunFolder, name: str) -> None:
    """submitit#1770, nextflow#3570."""
    seen = look(run, Slurm(ours(name)))
    assert not seen.final
    assert not seen.state.ended
    assert seen.exit_code is None


@pytest.mark.parametrize(
    "word", ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"]
)
def test_over_is_what_the_controller_calls_over(run: RunFolder, word: str) -> None:
    """There a job that Slurm requeues is PENDING or COMPLETING at once, and never in these."""
    seen = look(run, Slurm(ours(state=JobState(word), exit_code=81)))
    assert (seen.state, seen.final, seen.exit_code) == (word, True, 81)


@pytest.mark.parametrize(
    "error", [ControllerUnreachable("away"), CommandTimeout("slow"), CommandMissing("none"), SlurmError("?")]
)
def test_nobody_knows_is_not_the_end(run: RunFolder, error: SlurmError) -> None:
    seen = look(run, Slurm(error, [entry(JobState.COMPLETED)]))
    assert (seen.state, seen.final) == (JobState.UNKNOWN, False)


def test_forgotten_by_the_controller_the_newest_record_counts(run: RunFolder) -> None:
    """MFC#1311."""
    seen = look(run, Slurm(NoSuchJob("gone"), [entry(JobState.PREEMPTED, 2000), entry(JobState.COMPLETED, 2100)]))
    assert (seen.state, seen.final) == (JobState.COMPLETED, True)


def test_a_record_from_before_our_job_is_another_jobs(run: RunFolder) -> None:
    run.write_status(RunStatus("complete"))
    seen = look(run, Slurm(NoSuchJob("gone"), [entry(JobState.FAILED, 500.0)]))
    assert seen.state is JobState.COMPLETED


def test_an_id_that_came_round_again(run: RunFolder) -> None:
    run.write_status(RunStatus("failed"))
    strangers = ours(command="/home/bob/other.sh", state=JobState.RUNNING)
    assert look(run, Slurm(strangers)) == Look(JobState.FAILED, True, "the run's folder; Slurm has forgotten the job")


@pytest.mark.parametrize("history", [[], CommandMissing("no sacct"), SlurmError("Slurm accounting storage is disabled")])
@pytest.mark.parametrize(
    ("state", "word"), [("complete", "COMPLETED"), ("failed", "FAILED"), ("cancelled", "CANCELLED"), ("running", "UNKNOWN")]
)
def test_without_accounting_the_run_itself_tells(run: RunFolder, history: Any, state: Any, word: str) -> None:
    run.write_status(RunStatus(state))
    seen = look(run, Slurm(NoSuchJob("gone"), history))
    assert (seen.state.value, seen.final) == (word, True)


# --- the object ---------------------------------------------------------------------------------------------------


class Looks:
    """A handle that sees one thing after the other; the last one for good."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)
        self.asked = 0
        self.cancelled = False

    def look(self) -> Look:
        self.asked += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def cancel(self) -> None:
        self.cancelled = True


def the_job(run: RunFolder, *looks: Look) -> ResilientJob[Any]:
    job = ResilientJob[Any](
        run.path, {"cluster": "slurm", "job_id": "32", "run_id": "train-1-abc", "submitted_at": 1990.0, "script": SCRIPT}
    )
    job._handle = Looks(*looks)
    return job


RUNNING, DONE = Look(JobState.RUNNING, False, "scontrol"), Look(JobState.COMPLETED, True, "scontrol", 0)


def test_a_result_of_an_attempt_does_not_count_while_another_may_follow(run: RunFolder) -> None:
    """The first attempt left one, and the job was requeued all the same."""
    CallFolder(run.path / "call").write_result(Result(1, "half"))
    job = the_job(run, RUNNING)
    assert not job.done(force_check=True)
    assert job.wait(timeout=0.3) is False
    assert job.state == "RUNNING"


def test_the_result_in_the_end(run: RunFolder) -> None:
    (run.path / "call" / "function.pkl").touch()
    CallFolder(run.path / "call").write_result(Result(3, {"loss": 0.5}))
    run.write_status(RunStatus("complete", step=10))
    job = the_job(run, RUNNING, RUNNING, DONE)
    assert job.wait(timeout=90) is True
    assert job.exception() is None
    assert job.result() == {"loss": 0.5}
    assert job.results() == [{"loss": 0.5}]
    assert job.state == "COMPLETED"


def test_a_command_has_no_result_and_no_failure(run: RunFolder) -> None:
    run.write_status(RunStatus("complete"))
    assert the_job(run, DONE).result() is None


def test_after_the_end_nobody_is_asked_again(run: RunFolder) -> None:
    job = the_job(run, DONE)
    for _ in range(5):
        assert job.done(force_check=True)
    handle = job._handle
    assert isinstance(handle, Looks)
    assert handle.asked == 1


def test_a_failure_says_what_happened_and_survives_pickling(run: RunFolder) -> None:
    run.write_status(RunStatus("failed", cause="app_error", reason="the same exception twice", exit_code=80))
    folder = CallFolder(run.path / "call")
    for attempt, rank, text in ((1, 0, "old"), (2, 1, "later rank"), (2, 0, "the culprit")):
        folder.write_error(attempt, rank, ValueError(text), f"Traceback of {text}")
    job = the_job(run, Look(JobState.FAILED, True, "scontrol", 80))
    failure = job.exception()
    assert isinstance(failure, JobFailed)
    again = pickle.loads(pickle.dumps(failure))
    for one in (failure, again):
        assert one.cause is Cause.APP_ERROR
        assert one.traceback == "Traceback of the culprit"
        assert all(
            part in str(one)
            for part in ("train-1-abc", "the same exception twice", "exit code 80", "rank 0 of attempt 2", "ValueError")
        )
    with pytest.raises(JobFailed):
        job.result()
    assert job.exit_code == 80


def test_complete_without_a_result_is_a_failure(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "_RESULT_PATIENCE_S", 0.2)
    (run.path / "call" / "function.pkl").touch()
    run.write_status(RunStatus("complete"))
    failure = the_job(run, DONE).exception()
    assert failure is not None
    assert "its result is not there" in str(failure)


def test_never_begun(run: RunFolder) -> None:
    failure = the_job(run, Look(JobState.CANCELLED, True, "scontrol")).exception()
    assert failure is not None
    assert "no supervisor ever began" in str(failure)


def test_logs_of_all_attempts_and_of_one(run: RunFolder) -> None:
    job = the_job(run, RUNNING)
    assert job.stdout() is None
    assert job.stderr() is None
    for attempt in (1, 2):
        folder = run.logs / f"attempt-{attempt:04d}"
        folder.mkdir()
        (folder / "rank-00000.log").write_text(f"attempt {attempt}\n")
    (run.logs / "job-32.out").write_text("supervisor\n")
    assert job.stdout() == "attempt 1\nattempt 2\n"
    assert job.stdout(attempt=2) == "attempt 2\n"
    assert job.stdout(rank=7) is None
    assert job.stderr() == "supervisor\n"


def test_attempts_and_events(run: RunFolder) -> None:
    events = EventWriter(run.path, restart=0)
    events.write("run_started")
    events.attempt = 1
    events.write("attempt_started", nodes=["n1", "n2"], world=2)
    events.write("fault_detected", cause="node_lost", node="n2")
    events.write("attempt_stopped")
    events.attempt = 2
    events.write("attempt_started", nodes=["n1"], world=1)
    events.close()
    job = the_job(run, RUNNING)
    first, second = job.attempts
    assert (first["attempt"], first["nodes"], first["cause"]) == (1, ["n1", "n2"], "node_lost")
    assert "stopped_at" in first
    assert (second["world"], second.get("cause")) == (1, None)
    assert next(event["event"] for event in job.events()) == "run_started"


def test_cancel(run: RunFolder) -> None:
    job = the_job(run, RUNNING)
    job.cancel()
    assert isinstance(job._handle, Looks)
    assert job._handle.cancelled


# --- a local run --------------------------------------------------------------------------------------------------


def test_a_process_is_known_by_when_it_began(run: RunFolder) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        started = process_started(child.pid)
        assert LocalHandle(child.pid, started=started, boot=boot_id(), run=run).look().state is JobState.RUNNING
        run.write_status(RunStatus("complete"))
        for imposter in (
            LocalHandle(child.pid, started="1", boot=boot_id(), run=run),
            LocalHandle(child.pid, started=started, boot="x", run=run),
        ):
            assert imposter.look().final
        handle = LocalHandle(child.pid, started=started, boot=boot_id(), run=run)
        handle.cancel()
        deadline = time.monotonic() + 90
        while not handle.look().final:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert handle.look().state is JobState.COMPLETED, "what the run says, not how its process ended"
        assert process_started(child.pid) == ""
    finally:
        if child.poll() is None and process_started(child.pid):
            os.killpg(child.pid, 9)


def test_whoever_waits_frees_a_job_that_a_requeue_left_held(run: RunFolder) -> None:
    done: list[str] = []

    class Orphaned(Slurm):
        def update(self, job_id: str, **fields: str) -> None:
            done.append(next(iter(fields)))

        def release(self, job_id: str) -> None:
            done.append("release")

    for comment, calls in (("mine [slurm-resilience requeue r at 1000]", ["StartTime", "release", "Comment"]), ("mine", [])):
        done.clear()
        seen = look(run, Orphaned(ours("job-held.txt", comment=comment)))
        assert not seen.final
        assert done == calls


def test_a_run_that_goes_on_in_another_job_is_followed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Both(Slurm):
        def job(self, job_id: str) -> JobRecord:
            asked.append(job_id)
            return ours(state=JobState.PREEMPTED if job_id == "32" else JobState.RUNNING)

    monkeypatch.setattr("slurm_resilience.submit.handles.CommandClient", lambda: Both(NoSuchJob("none")))
    description = {"cluster": "slurm", "job_id": "32", "run_id": "r", "submitted_at": 1990.0, "script": SCRIPT}
    job = ResilientJob[Any](run.path, description)
    job.save_description()
    assert job.done()
    job = ResilientJob[Any](run.path, description)
    ResilientJob[Any](run.path, {**description, "job_id": "33"}).save_description()
    assert not job.done()
    assert (job.job_id, job.state, asked) == ("33", "RUNNING", ["32", "32", "33"])


def test_accounting_says_why_an_attempt_ended_that_could_not(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """aws-parallelcluster#1671: its supervisor died with its node."""
    for restart, attempt in ((0, 1), (1, 2), (2, 3)):
        writer = EventWriter(run.path, restart=restart)
        writer.attempt = attempt
        writer.write("attempt_started", nodes=["n1"], world=1)
        if restart == 1:
            writer.write("warning_explained", cause="preemption")
    history = [entry(JobState.NODE_FAIL, 2000), entry(JobState.NODE_FAIL, 2100), entry(JobState.RUNNING, 2200)]
    monkeypatch.setattr("slurm_resilience.submit.handles.CommandClient", lambda: Slurm(ours(), history))
    description = {"cluster": "slurm", "job_id": "32", "run_id": "r", "submitted_at": 1990.0, "script": SCRIPT}
    job = ResilientJob[Any](run.path, description)
    assert [each.get("cause") for each in job.attempts] == ["node_lost", "preemption", None]


def test_a_requeue_that_the_controller_forgot_is_no_end(run: RunFolder) -> None:
    again: list[str] = []

    class Forgetful(Slurm):
        def requeue(self, job_id: str) -> bool:
            again.append(job_id)
            return True

    seen = look(run, Forgetful(ours(state=JobState.FAILED, exit_code=75, comment="resilient")))
    assert (seen.final, again) == (False, ["32"])
    seen = look(run, Forgetful(ours(state=JobState.FAILED, exit_code=81, comment="resilient")))
    assert (seen.final, again) == (True, ["32"])
