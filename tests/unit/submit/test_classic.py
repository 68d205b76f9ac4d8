"""Functions without a Run, submitit's Checkpointable, arrays, and the debug cluster: what can be seen without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience import map_resilient, submit_resilient
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause, ConfigError
from slurm_resilience.submit.classic import wants_run
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.parameters import settle
from slurm_resilience.submit.prepare import work_of


class Checkpointing:
    def __call__(self, value: int) -> int:
        return value

    def checkpoint(self, value: int) -> Any:
        return None


def named(run: Any, value: int) -> int:
    return value


def other_name(r: Any, value: int) -> int:
    return value


def plain(value: int) -> int:
    return value


def either(value: int, more: int = 0) -> int:
    return value


def annotated(a: "Run", value: int = 0) -> int:  # type: ignore[name-defined]  # noqa: F821, UP037
    return value


def greedy(*values: int) -> int:
    return len(values)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (named, (1,), True),
        (other_name, (1,), True),
        (plain, (1,), False),
        (either, (1,), False),
        (annotated, (1,), True),
        (greedy, (1,), False),
        (lambda run: 0, (), True),
        (lambda: 0, (), False),
        (Checkpointing(), (1,), False),
        (named, (1, 2, 3), True),  # wrong either way: its own error will say so
    ],
)
def test_who_gets_a_run(function: Callable[..., Any], args: tuple[Any, ...], expected: bool) -> None:
    assert wants_run(function, args, {}) is expected


def test_debug_calls_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("x")
    job = submit_resilient(plain, 7, cluster="debug", folder=folder)
    assert (job.done(), job.state, job.result(), job.cluster) == (True, "COMPLETED", 7, "debug")
    failed = submit_resilient(lambda: 1 / 0, cluster="debug", folder=folder)
    failure = failed.exception()
    assert failure is not None
    assert failure.cause is Cause.APP_ERROR
    assert "ZeroDivisionError" in failure.traceback
    jobs = map_resilient(either, [1, 2], [10, 20], cluster="debug", folder=folder)
    assert [each.result() for each in jobs] == [1, 2]


@pytest.mark.parametrize("values", [(), ([],), ([1, 2], [1])])
def test_values_that_do_not_fit_together(values: tuple[list[int], ...]) -> None:
    with pytest.raises(ConfigError, match="one value of each kind"):
        map_resilient(plain, *values, cluster="debug")


def test_an_array_is_one_script_and_a_folder_for_each_task(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[str] = []

    class Slurm:
        def submit(self, script: str, options: Any = (), environment: Any = None) -> str:
            queued.append(script)
            return "40"

        def pending(self, user: str) -> list[Any]:
            return []

    monkeypatch.setattr(ResilientExecutor, "affinity", classmethod(lambda cls: 2))
    folder = tmp_path_factory.mktemp("it's 100%a")
    monkeypatch.setattr("slurm_resilience.submit.folders._USUALLY_LOCAL", ())
    executor = ResilientExecutor(folder, config=ResilienceConfig(), client=Slurm())  # type: ignore[arg-type]
    executor.update_parameters(name="many")
    jobs = executor.submit_works([work_of(plain, (value,), {}) for value in (5, 6, 7)], parallel=2)
    assert [job.job_id for job in jobs] == ["40_0", "40_1", "40_2"]
    assert [job.run_dir.name for job in jobs] == ["task-0", "task-1", "task-2"]
    assert len({job.run_id for job in jobs}) == 3
    text = Path(queued[0]).read_text()
    assert "#SBATCH --array=0-2%2\n" in text
    assert "/task-%a/logs/job-%A_%a.out" in text
    # the shell's own reading of the settings, for the second task
    head = text.partition("# ---- settings")[2].partition("\n")[2].partition("# ---- body")[0]
    shown = subprocess.run(
        ["bash", "-c", head + 'printf "%s\\n" "$run_dir" "${options[@]}" "${command[@]}"'],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[0] == str(jobs[1].run_dir)
    assert str(jobs[1].run_dir / "config.yaml") in shown
    assert shown[-2:] == ["slurm_resilience.submit.call", str(jobs[1].run_dir / "call")]
    assert jobs[2].paths.stdout == jobs[2].run_dir / "logs" / "job-40_2.out"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("afterany:4", "afterany:4"),
        ("4", "afterok:4"),
        (4, "afterok:4"),
        ([4, "5_1"], "afterok:4:5_1"),
        (["after:1", "after:2"], "after:1,after:2"),
    ],
)
def test_dependencies(value: Any, expected: str) -> None:
    assert settle({"dependency": value}, ResilienceConfig()).options["dependency"] == expected


def test_a_dependency_on_a_local_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="no list of jobs"):
        settle({"dependency": [4, "local"]}, ResilienceConfig())


def test_spares_are_asked_for() -> None:
    assert settle({}, ResilienceConfig(nodes=(2, 4), spares=1)).options["nodes"] == "2-5"


def test_submitit_finds_our_plugins(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The entry points that the package declares, read as an installed one's would be."""
    root = Path(__file__).parents[3]
    section = (root / "pyproject.toml").read_text().partition("[project.entry-points.submitit]\n")[2].partition("\n\n")[0]
    site = tmp_path_factory.mktemp("site")
    info = site / "probe-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[submitit]\n" + section.replace('"', "") + "\n")
    code = (
        "from submitit.core.plugins import get_executors, get_job_environment\n"
        "env = get_job_environment()\n"
        "print(get_executors()['resilient'].__name__, env.name(), env.job_id, env.global_rank, env.num_tasks, env.node)\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(root)]), "SUBMITIT_EXECUTOR": "resilient", "RANK": "3",
        "WORLD_SIZE": "8", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "RESILIENCE_JOB_ID": "40_1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ResilientExecutor", "resilient", "40_1", "3", "8", "1"], done.stderr
