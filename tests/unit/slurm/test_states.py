"""Slurm's job states are kept apart."""

from __future__ import annotations

import pytest

from slurm_resilience.slurm.states import JobState, cancelled_by, parse_state


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_is_read_as_itself(state: JobState) -> None:
    assert parse_state(state.value) is state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1001", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("PENDING,COMPLETING", JobState.COMPLETING),
        ("RUNNING*", JobState.RUNNING),
        ("completed", JobState.COMPLETED),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_reads_what_commands_print(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_who_cancelled() -> None:
    assert cancelled_by("CANCELLED by 1001") == 1001
    assert cancelled_by("CANCELLED") is None


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.PENDING, JobState.RUNNING, JobState.REQUEUED,
                                   JobState.REQUEUE_HOLD, JobState.SUSPENDED, JobState.CONFIGURING, JobState.SPECIAL_EXIT,
                                   JobState.SIGNALING, JobState.STOPPED, JobState.RESIZING, JobState.UNKNOWN])  # fmt: skip
def test_these_are_not_the_end(state: JobState) -> None:
    assert not state.ended


@pytest.mark.parametrize("state", [JobState.PREEMPTED, JobState.NODE_FAIL, JobState.REQUEUED])
def test_slurm_may_requeue_out_of_these(state: JobState) -> None:
    assert state.may_return
    assert not JobState.COMPLETED.may_return


def test_running_by_other_names() -> None:
    assert {state for state in JobState if state.running} == {JobState.RUNNING, JobState.SIGNALING, JobState.RESIZING}
