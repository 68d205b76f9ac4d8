"""From a call of submit_resilient() to what is queued: all checks first, everything written before, nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_resilience import ResilienceConfig, submit_resilient
from slurm_resilience.errors import ConfigError, SlurmError, SubmitError
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.failures import CommandTimeout
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState
from slurm_resilience.submit.api import merge_config
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.job import ResilientJob
from slurm_resilience.submit.payload import CallFolder
from tests.unit.slurm.recordings import job as recorded

pytestmark = pytest.mark.filterwarnings("ignore:.*local to each node")


class Queue(CommandClient):
    """Takes scripts instead of sbatch, and looks at what is there at that moment."""

    def __init__(self, refusal: SlurmError | None = None) -> None:
        super().__init__()
        self.refusal = refusal
        self.scripts: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.there: list[set[str]] = []
        self.command = ""

    def submit(self, script: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str:
        if self.refusal:
            raise self.refusal
        self.scripts.append(Path(script).read_text())
        self.environments.append(dict(environment or {}))
        run_dir = Path(script).parent.parent
        self.there.append({str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()})
        return str(100 + len(self.scripts))


def fit(run: Any, a: int, *, b: int = 0) -> int:
    return a + b


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and an sbatch on PATH that must not be called."""
    folder = tmp_path_factory.mktemp("submission")
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\nexit 99\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return folder / "runs"


def test_everything_is_there_before_the_job_is_queued(plain: Path) -> None:
    queue = Queue()
    executor = ResilientExecutor(plain, config=ResilienceConfig.build({"nodes": (2, 4)}), client=queue)
    executor.update_parameters(name="fit", partition="low", time="00:30:00")
    job = executor.submit(fit, 40, b=2)
    assert isinstance(job, ResilientJob)
    assert {"run.json", "config.yaml", "call/function.pkl", "call/path.json", "call/submission.sh"} <= queue.there[0]
    call = CallFolder(job.run_dir / "call").read()
    assert (call.function(None, *call.args, **call.kwargs), job.job_id) == (42, "101")
    assert job.run_dir.parent == plain
    assert job.run_dir.name.startswith("fit-")
    assert job.run_id.startswith(job.run_dir.name), "the run's id is not the job's"
    assert yaml.safe_load((job.run_dir / "config.yaml").read_text())["nodes"] == [2, 4]
    assert "#SBATCH --partition=low" in queue.scripts[0]
    assert (job.run_dir / "call" / "function.pkl").stat().st_mode & 0o077 == 0, "a pickle is the user's alone"


def test_two_runs_have_two_folders_and_a_batch_is_an_array(plain: Path) -> None:
    queue = Queue()
    executor = ResilientExecutor(plain, client=queue)
    with executor.batch():
        jobs = [executor.submit(fit, number) for number in range(3)]
    assert [job.job_id for job in jobs] == ["101_0", "101_1", "101_2"]
    assert len({job.run_dir for job in jobs}) == 3
    assert all(type(job) is ResilientJob for job in jobs)
    (script,) = queue.scripts
    assert "--array=0-2" in script


def test_a_refusal_leaves_nothing_behind(plain: Path) -> None:
    refusal = SlurmError("`sbatch` failed", evidence="sbatch: error: invalid partition specified: lwo")
    executor = ResilientExecutor(plain, client=Queue(refusal))
    with pytest.raises(SubmitError, match="invalid partition specified: lwo"):
        executor.submit(fit, 1)
    assert list(plain.iterdir()) == []


def test_when_sbatch_does_not_answer_the_folder_stays(plain: Path) -> None:
    """The job may have been queued, and would need it."""
    executor = ResilientExecutor(plain, client=Queue(CommandTimeout("no answer", evidence="killed after 120 s")))
    with pytest.raises(CommandTimeout, match="may or may not be queued"):
        executor.submit(fit, 1)
    assert len(list(plain.iterdir())) == 1


def test_nothing_of_a_surrounding_job_leaks(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CPU_BIND", "SBATCH_PARTITION", "PMI_RANK", "RESILIENCE_PAGE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    queue = Queue()
    ResilientExecutor(plain, client=queue).submit(fit, 1)
    assert queue.environments[0]["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert not any(
        name.startswith(("SLURM_J", "SLURM_N", "SLURM_CPU", "SBATCH", "PMI", "RESILIENCE")) for name in queue.environments[0]
    )


def test_the_environment_does_not_overrule_what_was_asked_for(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    queue = Queue()
    executor = ResilientExecutor(plain, client=queue)
    executor.update_parameters(partition="low")
    executor.submit(fit, 1)
    assert "SBATCH_PARTITION" not in queue.environments[0]
    assert queue.environments[0]["SBATCH_ACCOUNT"] == "lab"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": (4, 2)}, r"did you mean \(2, 4\)"),
        ({"nodes": 0}, "at least one node"),
        ({"nodes": (1, 4), "ranks_per_node": 4, "config": {"global_batch": 8}}, "cannot be divided"),
        ({"config": {"chekpoint": {}}}, "did you mean 'checkpoint'"),
        ({"config": {"checkpoint": {"evry_steps": 3}}}, "did you mean 'every_steps'"),
        ({"partion": "low"}, "did you mean 'partition'"),
        ({"cluster": "slrum"}, "did you mean 'slurm'"),
        ({"time": "soon"}, "not a time limit"),
        ({"signal_delay_s": 7200, "timeout_min": 60}, "before the job has begun"),
        ({"folder": "/dev/shm/runs"}, "not shared|local to each node"),
        ({"folder": "a\nb"}, "cannot be used"),
        ({"ntasks": 4}, "ranks_per_node"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(plain: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        submit_resilient(fit, 1, **{"folder": plain, **changes})
    assert not plain.exists()


def test_what_cannot_be_sent_is_refused_and_leaves_nothing(plain: Path) -> None:
    executor = ResilientExecutor(plain, client=Queue())
    with pytest.raises(ConfigError, match="cannot be sent to the nodes"):
        executor.submit(fit, threading.Lock())
    assert list(plain.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be called"):
        submit_resilient(42, folder=plain)  # type: ignore[arg-type]


def test_without_sbatch(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SubmitError, match="no sbatch here"):
        submit_resilient(fit, 1, folder=plain)
    assert not plain.exists()


def test_going_on_with_an_earlier_run_keeps_its_name(plain: Path) -> None:
    from slurm_resilience.submit.prepare import Work

    executor = ResilientExecutor(plain, client=Queue())
    first = executor.submit_work(Work(command=("python", "train.py")))
    again = executor.submit_work(Work(command=("python", "train.py")), run_dir=first.run_dir)
    assert (again.run_id, again.run_dir) == (first.run_id, first.run_dir)
    assert again.job_id != first.job_id
    assert ResilientJob.from_dir(first.run_dir).job_id == again.job_id


def test_a_run_whose_job_waits_is_left_as_it_is(plain: Path) -> None:
    from slurm_resilience.submit.prepare import Work

    class Waiting(Queue):
        def job(self, job_id: str) -> JobRecord:
            found = recorded("job-running.txt")
            return dataclasses.replace(found, job_id=job_id, command=self.command, state=JobState.PENDING)

    queue = Waiting()
    executor = ResilientExecutor(plain, client=queue)
    first = executor.submit_work(Work(command=("python", "train.py")))
    queue.command = str(first.run_dir / "call" / "submission.sh")
    before = {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="has a job in Slurm already, 101"):
        executor.submit_work(Work(command=("python", "other.py")), run_dir=first.run_dir)
    assert {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()} == before
    executor.update_parameters(dependency="afterany:101")
    assert executor.submit_work(Work(command=("python", "other.py")), run_dir=first.run_dir).job_id == "102"


def test_the_job_pickles_and_comes_back_from_its_folder(plain: Path) -> None:
    job = ResilientExecutor(plain, client=Queue()).submit(fit, 1)
    for other in (pickle.loads(pickle.dumps(job)), ResilientJob.from_dir(job.run_dir)):
        assert (other.job_id, other.run_id, other.run_dir) == (job.job_id, job.run_id, job.run_dir)
    with pytest.raises(ConfigError, match="not the folder of a submitted run"):
        ResilientJob.from_dir(plain)


@pytest.mark.parametrize(
    ("config", "explicit", "nodes", "every"),
    [
        (None, {"nodes": (1, 2)}, (1, 2), None),
        ({"nodes": (3, 4), "checkpoint.every_steps": 5}, {}, (3, 4), 5),
        ({"nodes": (3, 4)}, {"nodes": 2}, (2, 2), None),
        (ResilienceConfig.build({"nodes": 2, "checkpoint": {"every_steps": 7}}), {"nodes": "1-2"}, (1, 2), 7),
    ],
)
def test_explicit_arguments_win(config: Any, explicit: dict[str, Any], nodes: tuple[int, int], every: int | None) -> None:
    merged = merge_config(config, ranks_per_node=None, **explicit)
    assert merged.nodes == nodes
    assert merged.checkpoint.every_steps == every


def test_a_configuration_file(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("nodes: [1, 3]\ncheckpoint: {every_steps: 9}\n")
    merged = merge_config(path, nodes=None, ranks_per_node=2)
    assert (merged.nodes, merged.ranks_per_node, merged.checkpoint.every_steps) == ((1, 3), 2, 9)


def test_submitting_frees_what_a_dead_process_left_held(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[str] = []
    monkeypatch.setattr("slurm_resilience.submit.executor.sweep", lambda client, user: swept.append(user))
    ResilientExecutor(plain, client=Queue()).submit(fit, 1)
    assert len(swept) == 1


def test_a_complete_run_is_not_queued_again(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slurm_resilience.cli import main
    from slurm_resilience.runtime.run_folder import RunFolder, RunStatus

    monkeypatch.setattr(
        "slurm_resilience.submit.executor.ResilientExecutor.submit_work", lambda *_, **__: pytest.fail("queued")
    )
    run = RunFolder(plain / "old")
    run.prepare()
    run.write_status(RunStatus("complete", step=7))
    assert main(["submit", "--run-dir", str(run.path), "--", "true"]) == 0
    assert "complete (step 7); nothing is queued" in capsys.readouterr().out
