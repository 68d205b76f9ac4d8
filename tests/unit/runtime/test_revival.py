"""What the process does that is there when a job ends.  That Slurm brings such a job back is shown on the real one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from slurm_resilience.errors import ExitCode
from slurm_resilience.runtime.revival import attend, may_come_back
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.runtime.standby import last_word
from slurm_resilience.slurm.environment import SlurmEnvironment
from slurm_resilience.slurm.failures import ControllerUnreachable
from slurm_resilience.slurm.states import JobState
from tests.unit.runtime.test_requeue import Controller
from tests.unit.slurm.recordings import job as recorded


@pytest.mark.parametrize(
    ("version", "may"), [("22.05.8", False), ("23.11.10", False), ("24.05.0", True), ("24.11.5", True), ("", True)]
)
def test_which_releases_bring_jobs_back(version: str, may: bool) -> None:
    assert may_come_back({"SLURM_VERSION": version}) is may


def ending(folder: Path, then: JobState, *, restarts: int) -> tuple[Controller, str]:
    """The job runs on for two looks, of which one gets no answer, and then Slurm makes ``then`` of it."""
    controller = Controller(
        dataclasses.replace(recorded("job-running.txt"), restarts=1), job=[ControllerUnreachable("no answer")]
    )
    looks = 0

    def pause(seconds: float) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            start = time.time()
            end = start + (controller.record.time_limit_s or 0) if restarts > 1 else start
            controller.record = dataclasses.replace(
                controller.record, state=then, restarts=restarts, start_at=start, end_at=end, reason=""
            )
        return looks == 3

    return controller, attend(controller, folder, controller.record.job_id, 1, int(ExitCode.APP_ERROR), pause=pause)


def test_a_job_that_is_over_is_left_alone(tmp_path: Path) -> None:
    controller, said = ending(tmp_path, JobState.COMPLETING, restarts=1)
    assert said == ""
    assert not controller.updates
    assert not (tmp_path / "last-word.json").exists()


def test_a_job_that_comes_back_is_made_small_and_ends_with_the_code_of_its_run(tmp_path: Path) -> None:
    RunFolder(tmp_path).prepare()
    RunFolder(tmp_path).write_status(RunStatus("failed", "app_error", "the data is rotten", int(ExitCode.APP_ERROR), 7))
    controller, said = ending(tmp_path, JobState.COMPLETING, restarts=2)
    assert "has requeued job" in said
    assert {"NumNodes": "1-1"} in controller.updates
    assert controller.record.priority != 0, "it is let go"
    here = SlurmEnvironment.current(
        {"SLURM_JOB_ID": controller.record.job_id, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n1"}
    )
    word = last_word(tmp_path, here, RunFolder(tmp_path).status())
    assert word is not None
    assert word.code == int(ExitCode.APP_ERROR)
