"""One job at a time for a run: what Slurm says of the jobs that its folder names, and what is let through."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ConfigError, SlurmError
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.failures import CommandTimeout, NoSuchJob
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState
from slurm_resilience.submit.at_work import at_work, refuse_a_second
from tests.unit.slurm.recordings import job

SCRIPT = "r/call/submission.sh"


class Records(CommandClient):
    """A controller that knows these jobs."""

    def __init__(self, *records: JobRecord, failure: SlurmError | None = None) -> None:
        super().__init__()
        self.records = {record.job_id: record for record in records}
        self.failure = failure

    def job(self, job_id: str) -> JobRecord:
        if self.failure:
            raise self.failure
        if job_id not in self.records:
            raise NoSuchJob("no such job")
        return self.records[job_id]


def record(job_id: str = "7", **changes: Any) -> JobRecord:
    given = {"job_id": job_id, "raw_job_id": job_id, "command": f"/x/{SCRIPT}", "name": "mini", **changes}
    return dataclasses.replace(job("job-running.txt"), **given)


def folder(tmp_path: Path, *, submitted: str = "7", supervised: str = "", restart: int = 0, state: str = "running") -> Path:
    (tmp_path / "job.json").write_text(json.dumps({"v": 1, "cluster": "slurm", "job_id": submitted, "script": SCRIPT}))
    if supervised:
        (tmp_path / "supervisor.json").write_text(json.dumps({"v": 1, "job_id": supervised, "restart_count": restart}))
        (tmp_path / "state.json").write_text(json.dumps({"v": 1, "state": state}))
    return tmp_path


WAITS = {"state": JobState.PENDING, "reason": "Priority", "nodes": ()}


@pytest.mark.parametrize(
    ("found", "about"),
    [
        (record(), {}),
        (record(**WAITS), {}),
        (record(state=JobState.SUSPENDED), {}),
        (record(command="/own/train.sh"), {"submitted": "6", "supervised": "7"}),  # of a script of the user's own
        (record(command="/own/train.sh", restarts=3, **WAITS), {"submitted": "6", "supervised": "7", "restart": 2}),
        (record(restarts=3, **WAITS), {"supervised": "7", "restart": 2, "state": "requeued"}),
    ],
)
def test_a_job_that_waits_or_runs_is_named_with_what_to_do(tmp_path: Path, found: JobRecord, about: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_a_second(Records(found), folder(tmp_path, **about))
    said = str(refused.value)
    assert f"it is {found.state}" in said
    for words in ("job in Slurm already, 7,", "`slurm-resilience requeue 7`", "`scancel 7`", "--dependency=afterany:7"):
        assert words in said


@pytest.mark.parametrize(
    ("client", "about"),
    [
        (Records(), {}),
        (Records(failure=CommandTimeout("no answer")), {"supervised": "7"}),
        (Records(record(state=JobState.CANCELLED)), {}),
        (Records(record(state=JobState.NODE_FAIL)), {"supervised": "7"}),
        (Records(dataclasses.replace(job("job-cancelled-completing.txt"), job_id="7", command=f"/x/{SCRIPT}")), {}),
        (Records(record(command="/x/other/call/submission.sh")), {}),  # the number came round again
        (Records(record(restarts=5)), {"supervised": "7", "restart": 2}),
        (Records(record()), {"supervised": "7", "state": "failed"}),  # its script ends in a moment
        (Records(record("local")), {"submitted": "local"}),
    ],
)
def test_one_that_is_over_or_not_known_is_no_obstacle(tmp_path: Path, client: Records, about: dict[str, Any]) -> None:
    refuse_a_second(client, folder(tmp_path, **about))


@pytest.mark.parametrize(
    ("dependency", "let"),
    [
        ("afterany:7", True),
        ("afterok:5:7,after:9", True),
        ("singleton", True),
        ("after:7", False),  # begins when the other begins
        ("afterany:77", False),
        ("", False),
    ],
)
def test_one_that_waits_for_its_end_may_be_queued(tmp_path: Path, dependency: str, let: bool) -> None:
    client, run_dir = Records(record()), folder(tmp_path)
    if let:
        refuse_a_second(client, run_dir, dependency=dependency, name="mini")
        return
    with pytest.raises(ConfigError):
        refuse_a_second(client, run_dir, dependency=dependency, name="mini")


def test_singleton_goes_by_the_name_and_a_third_has_to_wait_for_the_second(tmp_path: Path) -> None:
    first, second = record("7"), record("8", **{**WAITS, "reason": "Dependency"})
    client, run_dir = Records(first, second), folder(tmp_path, submitted="8", supervised="7")
    assert [each.job_id for each in at_work(client, run_dir)] == ["7", "8"]
    with pytest.raises(ConfigError, match=", 8,"):
        refuse_a_second(client, run_dir, dependency="afterany:7")
    with pytest.raises(ConfigError):
        refuse_a_second(client, run_dir, dependency="singleton", name="other")
    refuse_a_second(client, run_dir, dependency="afterany:7:8")


@pytest.mark.parametrize("text", ["[]", "{", '{"job_id": {}}', ""])
def test_a_damaged_folder_says_nothing(tmp_path: Path, text: str) -> None:
    for name in ("job.json", "supervisor.json", "state.json"):
        (tmp_path / name).write_text(text)
    assert at_work(Records(record()), tmp_path) == []
