"""`status`: one screen about a run, from its records alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli import main, which_run
from slurm_resilience.cli.status_screen import rows
from slurm_resilience.errors import ConfigError, ExitCode
from slurm_resilience.observe import json_lines
from slurm_resilience.observe.events import EventWriter
from slurm_resilience.observe.standing import Standing
from slurm_resilience.slurm.failures import NoSuchJob
from slurm_resilience.slurm.records import JobRecord

RECORD = (
    "JobId={job} JobName=x UserId=u(1) GroupId=u(1) JobState={state} Reason={reason} Restarts=1 "
    "StartTime={start} EndTime={end} Command={command} WorkDir={work} StdOut={log}"
)


def record(tmp_path: Path, **fields: str) -> JobRecord:
    known = {"job": "7", "state": "RUNNING", "reason": "None", "start": "1970-01-01T00:00:00", "end": "1970-01-01T01:00:00",
             "command": "(null)", "work": str(tmp_path), "log": str(tmp_path / "log")}  # fmt: skip
    return JobRecord.parse(RECORD.format(**{**known, **fields}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that lost a node, came back and trains."""
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "run.json").write_text(
        json.dumps({"v": 1, "run_id": "r-1", "argv": ["x"], "config": {"budgets": {"node_lost": 10}}})
    )
    writer = EventWriter(folder, restart=0)
    writer.write("run_started", run_id="r-1", argv=["python", "train.py"])
    writer.write("allocation_started", nodes=["n1", "n2"], job_id="local")
    for node in ("n1", "n2"):
        writer.write("agent_joined", node=node, warm=True)
    writer.attempt = 1
    writer.write("attempt_started", nodes=["n1", "n2"], world=2, plan={"global_batch": 48, "mesh": {"dp_shard": 2}})
    writer.write("ranks_launched", world=2)
    writer.write("first_step", step=1, loss=0.5)
    writer.write("checkpoint_committed", step=10, name="c10", seconds=0.5, bytes=1_000_000)
    writer.write("fault_detected", cause="node_lost", node="n2", detail="silent")
    writer.write("agent_lost", node="n2", why="silent for 4.1 s")
    writer.write("attempt_stopped", cause="node_lost", node="n2", fault=True, detail="silent")
    writer.attempt = 2
    writer.write("attempt_started", nodes=["n1"], world=1, plan={"global_batch": 48})
    writer.write("ranks_launched", world=1)
    writer.write("resumed", step=10, checkpoint="c10")
    writer.write("first_step", step=11, loss=0.25)
    writer.close()
    return folder


def test_the_screen_says_what_one_looks_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run_dir)]) == ExitCode.OK
    out = " ".join(capsys.readouterr().out.split())
    for words in ("r-1: python train.py", "training", "2: 1 rank, global batch 48", "11, loss 0.2500",
                  "n2: lost, not in this attempt: silent for 4.1 s", "step 10 committed in 0.50 s",
                  "node_lost 1 of 10 spent", "node_lost (n2): back in"):  # fmt: skip
        assert words in out, words


def test_sixty_columns_without_control_codes(run_dir: Path) -> None:
    """A terminal of 60 columns, output piped: readable, no control codes."""
    done = subprocess.run(
        [sys.executable, "-m", "slurm_resilience", "status", str(run_dir)],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "COLUMNS": "60", "TERM": "xterm-256color"},
    )  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) <= 60
    assert all(char.isprintable() or char == "\n" for char in done.stdout)
    assert "global batch 48" in " ".join(done.stdout.split())


def test_json_holds_the_same(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run_dir), "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert (document["doing"], document["step"], document["attempt"]) == ("training", 11, 2)
    assert document["budgets"] == {"node_lost": {"used": 1, "allowed": 10}}
    assert document["incidents"][0]["cause"] == "node_lost"
    assert document["incidents"][0]["recovered"]
    assert document["nodes"]["n2"]["agent"] == "lost"


def test_a_folder_without_a_run_and_a_word_that_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == ExitCode.CONFIG_ERROR
    assert "There is no run in" in capsys.readouterr().err
    assert main(["status", "nonsense"]) == ExitCode.CONFIG_ERROR
    assert "neither a folder nor the number of a job" in capsys.readouterr().err


def test_a_prepared_run_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"v": 1, "run_id": "r-2", "argv": ["x"], "config": {}}))
    assert main(["status", str(tmp_path)]) == ExitCode.OK
    assert "no supervisor has written anything yet" in " ".join(capsys.readouterr().out.split())


class TestWhichRun:
    """A job leads to its run folder by what Slurm keeps of it."""

    @staticmethod
    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        return folder

    def test_by_the_script_that_submit_wrote(self, tmp_path: Path) -> None:
        run = self.make(tmp_path / "r")
        assert which_run.of_job(record(tmp_path, command=str(run / "call" / "submission.sh"))) == run

    def test_by_the_first_line_of_the_log_the_newest_where_runs_share_one(self, tmp_path: Path) -> None:
        tmp_path = tmp_path.parent  # a run folder with a line break in its name is refused at submission
        old, new = self.make(tmp_path / "old"), self.make(tmp_path / "new run")
        (tmp_path / "log").write_text(f"hello\nslurm-resilience: run o-1 in {old}\nx\nslurm-resilience: run n-1 in {new}\n")
        assert which_run.of_job(record(tmp_path)) == new

    def test_by_the_first_object_of_a_log_for_programs(self, tmp_path: Path) -> None:
        old, new = self.make(tmp_path / "old"), self.make(tmp_path / "new")
        first = json_lines.line(f"slurm-resilience: run n-1 in {new}", run_id="n-1", run_dir=str(new))
        (tmp_path / "log").write_text(f"hello\nslurm-resilience: run o-1 in {old}\n{first}\n" + '{"message": "x"}\n')
        assert which_run.of_job(record(tmp_path)) == new

    def test_by_the_place_of_the_template(self, tmp_path: Path) -> None:
        run = self.make(tmp_path / "resilience-runs" / "job-7")
        assert which_run.of_job(record(tmp_path)) == run

    def test_a_job_that_is_not_ours(self, tmp_path: Path) -> None:
        assert which_run.of_job(record(tmp_path, command="/somewhere/call/submission.sh")) is None

    def test_a_job_that_slurm_does_not_know(self, tmp_path: Path) -> None:
        class Nothing:
            def job(self, job_id: str) -> JobRecord:
                from slurm_resilience.slurm.failures import NoSuchJob

                raise NoSuchJob("Slurm knows no job 7")

        client: Any = Nothing()
        with pytest.raises(ConfigError, match="give its run folder instead"):
            which_run.find("7", client)


def test_slurms_word_on_the_job(tmp_path: Path) -> None:
    standing = Standing(job_id="7", restart=1, doing="training", because="on 2 ranks")
    common: dict[str, Any] = {"live": {}, "used": {}, "budgets": {}}
    told = dict(rows(standing, record=record(tmp_path), now=1800.0, **common))
    assert told["job"] == "7, restart 1, RUNNING, 30 min of its time left"
    waits = record(tmp_path, state="PENDING", reason="Resources", start="1970-01-01T02:00:00")
    assert dict(rows(standing, record=waits, now=3600.0, **common))["job"].endswith(
        "PENDING (Resources), Slurm expects it to start in 1.0 h"
    )


@pytest.mark.parametrize(("state", "doing"), [("CANCELLED", "unsupervised"), ("PENDING", "queued"), ("COMPLETING", "queued")])
def test_a_job_that_was_cancelled_in_the_queue_is_not_queued(
    state: str, doing: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(EventWriter(run_dir, restart=0)) as writer:
        writer.write("requeue_done")
    monkeypatch.setattr(which_run, "find", lambda word: (run_dir, record(run_dir, state=state)))
    assert main(["status", "7", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["doing"] == doing
    assert main(["status", "7"]) == ExitCode.OK
    assert ("submit again" in " ".join(capsys.readouterr().out.split())) is (doing == "unsupervised")


@pytest.mark.parametrize(
    ("state", "job", "now"),
    [
        ("PENDING", "7, restart 1, PENDING (Resources)", "now queued"),
        ("CANCELLED", "7, CANCELLED (Resources)", "now unsupervised"),
    ],
)
def test_a_run_that_has_never_started_shows_its_job_and_why_it_waits(
    state: str, job: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"v": 1, "run_id": "r-1", "argv": ["python", "train.py"]}))
    (tmp_path / "job.json").write_text(json.dumps({"v": 1, "job_id": "7"}))
    waits = record(tmp_path, state=state, reason="Resources", command=str(tmp_path / "call" / "submission.sh"))
    monkeypatch.setattr("slurm_resilience.slurm.client.CommandClient.job", lambda self, job_id: {"7": waits}[job_id])
    assert main(["status", str(tmp_path)]) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert f"job {job}" in shown
    assert now in shown


@pytest.mark.parametrize("task_id", ["0-2%1", "1"])
def test_a_task_of_an_array_that_waits_shows_its_job(
    task_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks that wait share one record of Slurm's, without a log that could name the run."""
    for number in (0, 1):
        folder = tmp_path / f"task-{number}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"v": 1, "run_id": f"r-{number}", "argv": ["x"]}))
        (folder / "job.json").write_text(json.dumps({"v": 1, "job_id": f"7_{number}"}))
    one = record(tmp_path, state="PENDING", reason="JobArrayTaskLimit", command=str(tmp_path / "submission.sh"))
    one.fields["ArrayTaskId"] = task_id
    monkeypatch.setattr("slurm_resilience.slurm.client.CommandClient.job", lambda self, job_id: {"7_1": one}[job_id])
    assert main(["status", str(tmp_path / "task-1")]) == ExitCode.OK
    assert "PENDING (JobArrayTaskLimit)" in capsys.readouterr().out
    assert which_run.of_job(one) == (tmp_path / "task-1" if task_id == "1" else None)
    assert not which_run.is_of(record(tmp_path, command="/another/submission.sh", state="PENDING"), tmp_path / "task-1")


def test_a_run_whose_job_slurm_has_forgotten_is_not_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(self: Any, job_id: str) -> JobRecord:
        raise NoSuchJob(f"Slurm knows no job {job_id}")

    (tmp_path / "run.json").write_text(json.dumps({"v": 1, "run_id": "r-1", "argv": ["x"]}))
    (tmp_path / "job.json").write_text(json.dumps({"v": 1, "job_id": "7"}))
    monkeypatch.setattr("slurm_resilience.slurm.client.CommandClient.job", nothing)
    assert main(["status", str(tmp_path)]) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "now unsupervised: it was queued, and Slurm does not know its job 7" in shown
    assert "submit again with the same --run-dir" in shown


def test_an_end_that_is_written_while_we_look_counts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def over(word: str) -> tuple[Path, JobRecord]:
        return run_dir, record(run_dir, state="COMPLETED")

    def last_word(folder: Path, old: str) -> None:
        with contextlib.closing(EventWriter(run_dir, restart=0)) as writer:
            writer.write("run_completed", step=30)

    monkeypatch.setattr(which_run, "find", over)
    monkeypatch.setattr("slurm_resilience.cli.status._newer_job", last_word)
    assert main(["status", "7"]) == ExitCode.OK
    assert "complete" in capsys.readouterr().out


def test_a_run_that_was_submitted_again_is_queued_as_its_new_job(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(EventWriter(run_dir, restart=0)) as writer:
        writer.write("requeue_done", action="resubmitted", job="8")
    (run_dir / "job.json").write_text(json.dumps({"v": 1, "job_id": "8"}))
    new = record(run_dir, job="8", state="PENDING", command=str(run_dir / "call" / "submission.sh"))
    monkeypatch.setattr(which_run, "find", lambda word: (run_dir, record(run_dir, state="FAILED")))
    monkeypatch.setattr("slurm_resilience.slurm.client.CommandClient.job", lambda self, job_id: {"8": new}[job_id])
    assert main(["status", "7"]) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "job 8, restart 1, PENDING" in shown
    assert "now queued" in shown
    assert "submit again" not in shown


def test_ranks_of_the_live_view_only_for_the_attempt_that_it_is_about(tmp_path: Path) -> None:
    standing = Standing.of([{"t": 1.0, "event": "attempt_started", "attempt": 3, "restart": 0, "nodes": ["n1"], "world": 1}])
    rank = {"rank": 0, "step": 17, "phase": "step", "age_s": 0.25}
    common: dict[str, Any] = {"used": {}, "budgets": {}, "record": None, "now": 2.0}
    shown = rows(standing, live={"attempt": 3, "t": 0.5, "nodes": {"n1": [rank]}}, **common)
    launched = {"t": 1.1, "event": "ranks_launched", "attempt": 3, "restart": 0, "pids": {"n1": {"0": 4242}}}
    known = Standing.of([{"t": 1.0, "event": "attempt_started", "attempt": 3, "nodes": ["n1"], "world": 1}, launched])
    with_pid = rows(known, live={"attempt": 3, "t": 0.5, "nodes": {"n1": [rank, {**rank, "rank": 1}]}}, **common)
    assert any("rank 0 (pid 4242) at step 17" in text and "rank 1 at step 17" in text for _, text in with_pid)
    relaunched = Standing.of([launched, {"t": 2.0, "event": "attempt_started", "attempt": 4, "nodes": ["n1"], "world": 1}])
    assert relaunched.pids == {}, "those of the attempt before are other processes, or nobody's"
    seen = "its ranks as seen 1.5 s ago:\n  rank 0 at step 17, in 'step', last beat 0.2 s before"
    assert any(seen in text for _, text in shown), "the age of the view is not a rank's silence"
    assert not any("step 17" in text for _, text in rows(standing, live={"attempt": 2, "nodes": {"n1": [rank]}}, **common))


def test_watching_into_a_pipe_writes_a_line_for_each_change(run_dir: Path) -> None:
    words = [sys.executable, "-m", "slurm_resilience", "status", str(run_dir), "--watch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        assert "training: on 1 rank; attempt 2; step 11, loss 0.2500; checkpoint of step 10; 1 incident\n" in first
        writer = EventWriter(run_dir, restart=0)
        writer.attempt = 2
        writer.write("step_reported", step=12, loss=0.2)  # a step alone is no change
        writer.write("checkpoint_committed", step=20, name="c20", seconds=0.5, bytes=1_000_000)
        assert "step 12, loss 0.2000; checkpoint of step 20" in watching.stdout.readline()
        writer.write("run_completed", step=20)
        writer.close()
        rest = watching.stdout.read()
        assert "complete" in rest
        assert watching.wait(60) == 0
    assert all(char.isprintable() or char == "\n" for char in first + rest)
