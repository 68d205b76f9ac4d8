"""What a run does where Slurm knows more of its job than the run's events say: every combination that has been seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slurm_resilience.observe.standing import Standing
from slurm_resilience.observe.standing_in_slurm import look_at_slurm
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState
from tests.unit.slurm.recordings import job

AGAIN = "submit again with the same --run-dir, and it goes on from its newest checkpoint"


LAST = "its supervisor left no word of an end (training, on 2 ranks)"
NONE = "no sign of its supervisor for 2 min, it ended without a word (training, on 2 ranks)"


def record(state: JobState, restarts: int = 0, **more: Any) -> JobRecord:
    given = {"job_id": "7", "state": state, "restarts": restarts, **more}
    return dataclasses.replace(job("job-running.txt"), **given)


def training(**more: Any) -> Standing:
    return Standing(**{"job_id": "7", "doing": "training", "because": "on 2 ranks", "since": 5.0, **more})


def left() -> Standing:
    return training(doing="unsupervised", because=f"{NONE}; where its job is over, submit again", silent_s=120.0)


@pytest.mark.parametrize(
    ("standing", "found", "doing", "because"),
    [
        # over in Slurm, and no event of an end
        (training(), record(JobState.NODE_FAIL, reason="NodeDown"), "unsupervised",
         f"Slurm has its job as NODE_FAIL (NodeDown) now, and {LAST}; {AGAIN}"),
        (left(), record(JobState.FAILED, reason=""), "unsupervised",
         f"{NONE}; Slurm has its job as FAILED now; {AGAIN}"),
        (training(doing="queued", because="x"), record(JobState.CANCELLED, reason=""), "unsupervised",
         f"it was queued, and Slurm has its job as CANCELLED now; {AGAIN}"),
        # ending
        (training(silent_s=6.0, because="on 2 ranks; no sign of its supervisor for 6 s: if it is dead, x"),
         record(JobState.COMPLETING, reason="TimeLimit"), "stopping",
         "Slurm is ending the job (TimeLimit), its supervisor left no word of that (training, on 2 ranks)"),
        (training(), record(JobState.COMPLETING, reason="TimeLimit"), "training", "on 2 ranks"),
        # back in the queue, or running again
        (left(), record(JobState.PENDING, 1), "queued", "Slurm has it in its queue, its last supervisor left no"),
        (left(), record(JobState.PENDING, job_id="9"), "queued", "Slurm has it in its queue, its last supervisor left no word"),
        (training(), record(JobState.RUNNING, 1), "starting", "Slurm has started it again, its supervisor has not said"),
        (training(job_id="7_2"), record(JobState.PENDING), "training", "on 2 ranks"),  # what all waiting tasks share
        (training(doing="queued", because="x"), record(JobState.PENDING, 1), "queued", "x"),
        # running without a supervisor
        (left(), record(JobState.RUNNING), "unsupervised",
         f"{NONE}; its job 7 still runs in Slurm; `slurm-resilience requeue 7` starts it again; or `scancel 7`, and {AGAIN}"),
        (training(), record(JobState.RUNNING), "training", "on 2 ranks"),
        # its own word counts
        (training(doing="complete", because="x"), record(JobState.FAILED), "complete", "x"),
        (training(doing="failed", because="x"), record(JobState.PENDING, 1), "failed", "x"),
    ],
)  # fmt: skip
def test_the_record_of_the_job_and_the_runs_own_word(standing: Standing, found: JobRecord, doing: str, because: str) -> None:
    look_at_slurm(standing, found)
    assert (standing.doing, standing.because[: len(because)]) == (doing, because)
    if doing in ("starting", "queued"):
        assert (standing.job_id, standing.restart) == (found.job_id, found.restarts)


@pytest.mark.parametrize(
    ("standing", "doing"),
    [(left(), "unsupervised"), (training(doing="queued", because="x"), "unsupervised"), (training(), "training")],
)
def test_a_job_that_slurm_has_forgotten(standing: Standing, doing: str) -> None:
    """One whose supervisor gives signs may be in another cluster's Slurm."""
    look_at_slurm(standing, None, forgotten=True)
    assert standing.doing == doing
    if doing == "unsupervised":
        assert "Slurm does not know its job 7 (any more, or it is another cluster's)" in standing.because
        assert standing.because.endswith(AGAIN)


@pytest.mark.parametrize("standing", [left(), training(), training(doing="queued", because="x")])
def test_no_answer_changes_nothing(standing: Standing) -> None:
    before = dataclasses.replace(standing)
    look_at_slurm(standing, None)
    assert standing == before


def test_how_long_is_not_said_of_what_nobody_has_timed() -> None:
    standing = training()
    look_at_slurm(standing, record(JobState.FAILED))
    assert standing.since is None
