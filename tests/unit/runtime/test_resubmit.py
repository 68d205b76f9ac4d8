"""The run goes on in a new job: which script, which options, who is told.  The real Slurm is in tests/slurm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import SlurmError
from slurm_resilience.runtime.resubmit import SCRIPT_VARIABLE, resubmit
from slurm_resilience.slurm.records import JobRecord
from tests.unit.runtime.stage import job_record

FIELDS = {
    "JobName": "train", "QOS": "normal", "TimeLimit": "00:30:00", "Account": "(null)", "WorkDir": "/w", "Partition": "low",
    "ExcNodeList": "n4", "Comment": "mine",
}  # fmt: skip


class Slurm:
    def __init__(self) -> None:
        self.submitted: tuple[str, list[str], dict[str, str]] | None = None

    def submit(self, script: str, options: Any = (), environment: Any = None) -> str:
        self.submitted = (script, list(options), dict(environment))
        return "99"


def record(**changes: str) -> JobRecord:
    return job_record(**{**changes, **{name: value for name, value in FIELDS.items() if name not in changes}})


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "train-1"
    (path / "call").mkdir(parents=True)
    return path


def test_a_submitted_run_is_queued_again_by_its_own_script(run_dir: Path) -> None:
    (run_dir / "call" / "submission.sh").touch()
    (run_dir / "job.json").write_text(
        json.dumps({"v": 1, "job_id": "7", "run_id": "r", "script": "train-1/call/submission.sh"})
    )
    slurm = Slurm()
    made = resubmit(slurm, record(), run_dir, nodes=(1, 3), exclude=("n2", "n4"), environment={"SLURM_NTASKS": "9", "A": "1"})  # type: ignore[arg-type]
    assert made == "99"
    assert slurm.submitted is not None
    script, options, environment = slurm.submitted
    assert script == str(run_dir / "call" / "submission.sh")
    assert set(options) >= {
        "--dependency=afterany:7", "--nodes=1-3", "--exclude=n[2,4]", "--partition=low", "--time=00:30:00",
        "--comment=mine resilient",
    }  # fmt: skip
    assert not any(option.startswith(("--account", "--array")) for option in options)
    assert environment == {"A": "1", "RUN_DIR": str(run_dir)}
    told = json.loads((run_dir / "job.json").read_text())
    assert (told["job_id"], told["run_id"], told["earlier_job_ids"]) == ("99", "r", ["7"])
    assert told["script"] == "train-1/call/submission.sh"


def test_one_task_of_an_array_is_queued_alone(run_dir: Path) -> None:
    task = run_dir / "task-2"
    (task / "call").mkdir(parents=True)
    (run_dir / "submission.sh").touch()
    (task / "job.json").write_text(json.dumps({"v": 1, "job_id": "7_2", "run_id": "r"}))
    slurm = Slurm()
    assert resubmit(slurm, record(ArrayJobId="7", ArrayTaskId="2"), task, environment={}) == "99_2"  # type: ignore[arg-type]
    assert slurm.submitted is not None
    assert {"--array=2", "--dependency=afterany:7_2"} <= set(slurm.submitted[1])
    assert json.loads((task / "job.json").read_text())["script"] == "train-1/submission.sh"


def test_a_script_of_the_users_own_is_kept_before_slurm_removes_it(run_dir: Path) -> None:
    spool = run_dir.parent / "slurm_script"
    spool.write_text("#!/bin/bash\n")
    slurm = Slurm()
    resubmit(slurm, record(), run_dir, environment={SCRIPT_VARIABLE: str(spool)})  # type: ignore[arg-type]
    assert slurm.submitted is not None
    assert slurm.submitted[0] == str(run_dir / "resubmission.sh")
    assert (run_dir / "resubmission.sh").read_text() == "#!/bin/bash\n"
    assert not (run_dir / "job.json").exists()


def test_without_a_script_nothing_is_queued(run_dir: Path) -> None:
    slurm = Slurm()
    with pytest.raises(SlurmError, match="script is not known"):
        resubmit(slurm, dataclasses.replace(record()), run_dir, environment={})  # type: ignore[arg-type]
    assert slurm.submitted is None
