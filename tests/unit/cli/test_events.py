"""`slurm-resilience events`: lines, JSON, incidents, and following a run that goes on."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.cli.events import table
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.events import EventWriter
from slurm_resilience.observe.incidents import Incidents


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    writer = EventWriter(tmp_path, restart=0)
    for t, name, fields in [
        (0.0, "allocation_started", {"nodes": ["n1", "n2"], "job_id": "7"}),
        (1.0, "ranks_launched", {}),
        (2.0, "first_step", {"step": 1}),
        (
            9.0,
            "fault_detected",
            {"cause": "rank_crash", "node": "n2", "rank": 1, "detail": "killed by SIGKILL", "since": 1008.9},
        ),
        (
            9.1,
            "attempt_stopped",
            {"fault": True, "cause": "rank_crash", "node": "n2", "rank": 1, "detail": "killed by SIGKILL"},
        ),
        (9.4, "first_step", {"step": 2}),
    ]:
        writer.write(name, t=1000.0 + t, attempt=1, **fields)
    writer.close()
    return tmp_path


def test_lines(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run_dir)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "00:16:40  job 7: 2 nodes (n1 n2)" in out
    assert "recovered from rank_crash (n2) in 0.50 s" in out


def test_json_is_one_document(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run_dir), "--json"]) == ExitCode.OK
    assert [event["seq"] for event in json.loads(capsys.readouterr().out)] == [1, 2, 3, 4, 5, 6]


def test_incidents(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run_dir), "--incidents"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "1. 1970-01-01 00:16:48 UTC  attempt 1: rank_crash (n2, rank 1): back in 0.50 s" in text
    assert "detected=0.10 stopped=0.20 first_step=0.50" in text
    assert main(["events", str(run_dir), "--incidents", "--json"]) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["cause"], found["phases"]["first_step"]) == ("rank_crash", 0.5)


def test_a_run_without_incidents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EventWriter(tmp_path, restart=0).write("run_started", run_id="r")
    assert main(["events", str(tmp_path), "--incidents"]) == ExitCode.OK
    assert capsys.readouterr().out == "no incidents\n"


def test_following_goes_on_to_the_end_of_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    follower = threading.Thread(target=lambda: codes.append(main(["events", str(run_dir), "--follow", "--json"])))
    follower.start()
    writer = EventWriter(run_dir, restart=0)
    writer.write("step_reported", step=3)
    writer.write("run_completed", step=3)
    follower.join(20)
    assert codes == [ExitCode.OK]
    told = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert told[-2:] == ["step_reported", "run_completed"]
    assert len(told) == 8


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(tmp_path / "nothing")]) == ExitCode.CONFIG_ERROR
    assert "There are no events" in capsys.readouterr().err


def test_a_job_that_waits_has_not_started_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert main(["events", str(tmp_path)]) == ExitCode.CONFIG_ERROR
    assert "has not started yet" in capsys.readouterr().err
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "17", "cluster": "slurm"}))
    assert main(["events", str(tmp_path)]) == ExitCode.CONFIG_ERROR
    assert "squeue -j 17" in capsys.readouterr().err


def test_a_cancel_is_nothing_to_come_back_from() -> None:
    warned = [
        {"t": 1.0, "event": "warning_received", "signal": "SIGTERM"},
        {"t": 1.1, "event": "warning_explained", "cause": "cancelled", "detail": "JobState=CANCELLED"},
        {"t": 2.0, "event": "attempt_stopped", "fault": False, "cause": "cancelled"},
    ]
    found = Incidents.of({"attempt": 1, "restart": 0, **event} for event in warned)
    told = table(found)
    assert "cancelled: ended on purpose" in told
    assert "come back" not in told


def test_lines_that_are_no_facts_are_passed_over_while_following_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = EventWriter(tmp_path, restart=0)
    writer.write("run_started", run_id="r", argv=["x"])
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('[1]\n{"event": 3}\n{"event": "no_time"}\n{"v": 1, "se\n')
    writer.write("run_completed", step=1)
    writer.close()
    for words in (["--follow", "--json"], ["--json"]):
        assert main(["events", str(tmp_path), *words]) == 0
        out = capsys.readouterr().out
        told = json.loads(out) if "--follow" not in words else [json.loads(line) for line in out.splitlines()]
        assert [event["event"] for event in told] == ["run_started", "run_completed"]
