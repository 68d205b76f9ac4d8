"""What the environment says, and how far it is believed."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.environment import SlurmEnvironment, submission_environment, tasks_per_node

JOB = {"SLURM_JOB_ID": "14", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"}


def here(**more: str) -> SlurmEnvironment:
    found = SlurmEnvironment.current({**JOB, **more})
    assert found is not None
    return found


def test_outside_of_a_job_there_is_none() -> None:
    assert SlurmEnvironment.current({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


def test_the_last_task_of_an_array_is_not_called_by_the_number_of_the_whole_array() -> None:
    task = here(SLURM_ARRAY_JOB_ID="14", SLURM_ARRAY_TASK_ID="2")
    assert (task.job_id, task.raw_job_id) == ("14_2", "14")
    assert here().job_id == "14"


@pytest.mark.parametrize(("text", "count"), [(None, 0), ("", 0), ("0", 0), ("3", 3)])
def test_restart_count_is_unset_in_the_first_run(text: str | None, count: int) -> None:
    more = {} if text is None else {"SLURM_RESTART_COUNT": text}
    assert here(**more).restart_count == count


def test_garbage_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(SlurmError, match="SLURM_RESTART_COUNT"):
        here(SLURM_RESTART_COUNT="many")


@pytest.mark.parametrize(("text", "counts"), [("4(x2),3", (4, 4, 3)), ("1", (1,)), ("2(x1)", (2,)), ("8,8", (8, 8))])
def test_tasks_per_node(text: str, counts: tuple[int, ...]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "4(x)", "four", "4(x2", "-1"])
def test_no_tasks_per_node(text: str) -> None:
    with pytest.raises(SlurmError, match="tasks per node"):
        tasks_per_node(text)


def test_sizes_of_an_earlier_allocation_are_not_believed() -> None:
    assert here(SLURM_TASKS_PER_NODE="2(x3)").tasks_per_node == (2, 2, 2)
    assert here(SLURM_TASKS_PER_NODE="2(x4)").tasks_per_node is None  # four nodes then, three now
    assert here(SLURM_NTASKS_PER_NODE="2").tasks_per_node == (2, 2, 2)


WORDS = """
PATH=/bin HOME=/home/a SLURM_CONF=/c SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_CPU_BIND=quiet SLURMD_NODENAME=n1 SBATCH_ACCOUNT=lab
SBATCH_PARTITION=old SBATCH_TIMELIMIT=1 PMI_RANK=0 PMIX_RANK=0 PMI2_X=1 RESILIENCE_PAGE=/dev/shm/x RANK=3 MASTER_ADDR=n1
CUDA_VISIBLE_DEVICES=0 TORCHELASTIC_RUN_ID=r SUBMITIT_EXECUTOR=slurm
"""
INHERITED = dict(pair.split("=") for pair in WORDS.split())


def test_nothing_of_the_surrounding_job_goes_into_a_new_one() -> None:
    assert submission_environment(INHERITED) == {"PATH": "/bin", "SLURM_CONF": "/c", "HOME": "/home/a"}


def test_on_a_login_node_the_users_defaults_stay_unless_something_else_was_asked_for() -> None:
    outside = {name: value for name, value in INHERITED.items() if name != "SLURM_JOB_ID"}
    kept = submission_environment(outside, decided={"partition", "time"})
    assert kept["SBATCH_ACCOUNT"] == "lab"
    assert kept["CUDA_VISIBLE_DEVICES"] == "0"
    assert "SBATCH_PARTITION" not in kept
    assert "SBATCH_TIMELIMIT" not in kept
    assert "SLURM_NTASKS" not in kept
