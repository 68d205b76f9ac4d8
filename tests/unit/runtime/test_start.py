"""What is refused before anything starts, and how options become a configuration."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli import run as cli
from slurm_resilience.errors import ConfigError
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.backend_slurm import SlurmBackend, srun_command
from slurm_resilience.runtime.by_hand import refusal
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.start import Wish, check_command, configure, default_run_dir, refuse_another_job, supervise
from slurm_resilience.runtime.surroundings import WISH_VARIABLE, Surroundings
from slurm_resilience.runtime.whereabouts import address_towards
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.environment import SlurmEnvironment
from slurm_resilience.slurm.records import JobRecord
from tests.unit.runtime.stage import job_record


def options(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    cli.configure(parser)
    return cli.overrides(parser.parse_args([*words, "--", "python", "train.py", "--lr", "1"]))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ((), {}),
        (("--nodes", "2-4", "--global-batch", "48"), {"nodes": "2-4", "global_batch": 48}),
        (("--checkpoint-every", "100"), {"checkpoint.every_steps": 100, "checkpoint.every_min": None}),
        (("--checkpoint-every", "30m"), {"checkpoint.every_min": 30.0}),
        (("--checkpoint-every", "90s"), {"checkpoint.every_min": 1.5}),
        (("--checkpoint-every", "2h"), {"checkpoint.every_min": 120.0}),
        (("--preload", "torch,numpy"), {"preload": ("torch", "numpy")}),
        (("--cold",), {"warm": False}),
        (("--set", "limits.step_s=60", "--set", "warm=false"), {"limits.step_s": 60, "warm": False}),
        (("--set", "nodes=1-2", "--nodes", "3"), {"nodes": "3"}),
    ],
)
def test_options_become_configuration_keys(words: tuple[str, ...], values: dict[str, Any]) -> None:
    assert options(*words) == values


@pytest.mark.parametrize("words", [("--checkpoint-every", "soon"), ("--checkpoint-every", "1.5"), ("--set", "warm")])
def test_nonsense_is_refused_with_an_example(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        options(*words)
    assert caught.value.remedy.startswith("write")


def test_the_file_gives_way_to_options(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: 2-4\nranks_per_node: 2\nlimits: {step_s: 10}\n")
    wish = Wish(("python",), config_file=str(path), values={"ranks_per_node": 8, "limits.init_s": 20})
    config, chosen = configure(wish, 4)
    assert (config.nodes, config.ranks_per_node, config.limits.step_s, config.limits.init_s) == ((2, 4), 8, 10, 20)
    assert chosen


def test_without_a_word_on_nodes_any_number_of_those_there_will_do() -> None:
    config, chosen = configure(Wish(("python",)), 6)
    assert config.nodes == (1, 6)
    assert not chosen


def test_an_allocation_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 nodes are too few: at least 3"):
        configure(Wish(("python",), values={"nodes": "3-4"}), 2)


def test_nodes_that_the_mesh_does_not_fit_on_are_no_choice() -> None:
    wide = {"ranks_per_node": 2, "mesh.tp": 2, "mesh.pp": 3}
    config, _ = configure(Wish(("python",), values=wide), 4)
    assert config.nodes == (3, 4)
    with pytest.raises(ConfigError, match="does not fit on fewer than 3 nodes"):
        configure(Wish(("python",), values={**wide, "nodes": "2-4"}), 4)


def test_a_typo_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="did you mean 'step_s'"):
        configure(Wish(("python",), values={"limits.stepp_s": 3}), 2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [(("no-such-program", "x"), "no-such-program"), ((sys.executable, "no-such-script.py"), "no-such-script.py")],
)
def test_a_command_that_cannot_start_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_command(argv, wrapped=False)
    check_command(argv, wrapped=True)  # only its wrapper knows
    check_command((sys.executable, "-m", "anything"), wrapped=False)


def test_outside_of_a_job_there_is_nothing_to_supervise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOBID", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--local"):
        supervise(Wish((sys.executable, "-c", "1")), show=print)
    assert list(tmp_path.iterdir()) == []


def environment(**more: str) -> SlurmEnvironment:
    found = SlurmEnvironment.current({"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]", **more})
    assert found is not None
    return found


def test_the_run_folder_of_a_job_is_the_same_after_a_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENCE_RUN_DIR", raising=False)
    assert default_run_dir(environment()) == default_run_dir(environment(SLURM_RESTART_COUNT="3")) == "resilience-runs/job-42"
    array = environment(SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="2")
    assert default_run_dir(array) == "resilience-runs/job-40_2"
    assert default_run_dir(None) == "resilience-runs/local"
    monkeypatch.setenv("RESILIENCE_RUN_DIR", "/x")
    assert default_run_dir(environment()) == "/x"


def test_a_job_whose_id_was_somebody_elses_before_gets_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RESILIENCE_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    now = time.time()
    assert default_run_dir(environment(), started_at=now) == "resilience-runs/job-42"
    folder = RunFolder("resilience-runs/job-42")
    folder.prepare()
    folder.open_run(argv=["a"], config={})
    assert (
        default_run_dir(environment(), started_at=now) == "resilience-runs/job-42"
    )  # its supervisor died, and this is the next
    later = now + 1000
    assert default_run_dir(environment(), started_at=later) == "resilience-runs/job-42-2"
    assert default_run_dir(environment(SLURM_RESTART_COUNT="1"), started_at=later) == "resilience-runs/job-42"
    assert default_run_dir(environment(), started_at=None) == "resilience-runs/job-42"
    second = RunFolder("resilience-runs/job-42-2")
    second.prepare()
    second.open_run(argv=["a"], config={})
    assert default_run_dir(environment(SLURM_RESTART_COUNT="1"), started_at=later) == "resilience-runs/job-42-2"


def test_the_address_is_that_of_the_way_to_the_others() -> None:
    assert address_towards([]) == "127.0.0.1"
    assert address_towards(["no-such-host.invalid", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="NodeAddr"):
        address_towards(["no-such-host.invalid"])


def test_an_agents_srun_asks_for_all_that_the_job_has_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = srun_command("42", "n3", "/r", binds=True)
    for word in (
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=n3",
        "--cpu-bind=none",
    ):
        assert word in command
    assert not any(word.startswith(("--exact", "--cpus-per-task", "--mem", "--gres")) for word in command)
    assert "--cpu-bind=none" not in srun_command("42", "n3", "/r", binds=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("SLURM_GPUS", "6")
    kept = SlurmBackend(RunFolder(tmp_path), "42", ("n1",), binds=True)._environment
    assert "SLURM_CPUS_PER_TASK" not in kept
    assert kept["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert kept["SLURM_GPUS"] == "6"


def test_where_gpus_are_known_a_nodes_own_number_is_asked_for_and_nothing_of_the_jobs_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--gpus-per-node=4" in srun_command("42", "n3", "/r", binds=True, gpus=4)
    assert "--gres=none" in srun_command("42", "n3", "/r", binds=True, gpus=0)
    uneven = srun_command("42", "n3", "/r", binds=True, gpus=4, others=["n1", "n2", "x"])
    assert "--exclude=n[1-2],x" in uneven
    assert not any(word.startswith("--nodelist") for word in uneven)
    for name, value in {"SLURM_GPUS": "6", "SLURM_GPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "gres/gpu=2"}.items():
        monkeypatch.setenv(name, value)
    kept = SlurmBackend(RunFolder(tmp_path), "42", ("n1", "n2"), binds=True, gpus={"n1": 4, "n2": 2})._environment
    assert not any("GPU" in name or "TRES" in name for name in kept if name.startswith("SLURM_"))


class Controller(CommandClient):
    """One that knows one job."""

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self.fields = fields

    def job(self, job_id: str) -> JobRecord:
        return job_record(JobId=job_id, **self.fields)


@pytest.mark.parametrize(
    ("job_id", "fields", "refused"),
    [
        ("8", {"JobState": "RUNNING"}, True),
        ("8", {"JobState": "COMPLETED"}, False),
        ("8", {"JobState": "PENDING"}, False),
        ("8", {"JobState": "RUNNING", "Restarts": "1"}, False),
        ("7", {"JobState": "RUNNING"}, False),
    ],
)
def test_a_run_that_another_job_works_on_is_refused(tmp_path: Path, job_id: str, fields: dict[str, str], refused: bool) -> None:
    before = SupervisorAddress(1, "10.0.0.1", 1, "t", 1, "another host", "7", 0)
    if not refused:
        refuse_another_job(before, job_id, RunFolder(tmp_path), Controller(**fields))
        return
    with pytest.raises(ConfigError, match="Job 7 works on") as caught:
        refuse_another_job(before, job_id, RunFolder(tmp_path), Controller(**fields))
    assert "scancel 7" in caught.value.remedy


def test_a_heterogeneous_job_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_HET_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"heterogeneous, with 2 components.*n1 alone"):
        supervise(Wish(argv=("true",), run_dir=str(tmp_path / "run")), show=print)
    assert not (tmp_path / "run").exists()


def test_a_component_of_a_heterogeneous_job_is_not_moved_alone() -> None:
    assert refusal(job_record(HetJobId="7", HetJobOffset="0")) == ""
    assert "give 7" in refusal(job_record(HetJobId="7", HetJobOffset="1"))


@pytest.mark.parametrize(
    ("wish", "codes", "said", "can"),
    [
        ("/w/wish", "", "puts the job back", True),
        ("", "", "cannot come back by itself", False),
        ("", "RequeueExit=1,70-80", "Slurm requeues what ends with code 75", True),
        ("", "#RequeueExit=75\nRequeueExitHold=75", "cannot come back by itself", False),
    ],
)
def test_a_missing_scontrol_is_found_out_at_the_start(
    wish: str, codes: str, said: str, can: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """submitit#1601, Lightning#21404, pyxis#129."""
    (tmp_path / "slurm.conf").write_text(f"ClusterName=c\n{codes}\n")
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PATH": "/nowhere", WISH_VARIABLE: wish}
    for name, value in {**environment, "SLURM_CONF": str(tmp_path / "slurm.conf")}.items():
        monkeypatch.setenv(name, value)
    here = SlurmEnvironment.current()
    assert here is not None
    around = Surroundings.of(here)
    assert said in around.problem
    assert "There is no command 'scontrol' here" in around.problem
    assert (around.can_requeue, around.script_requeues) == (can, can)
