"""Each shipped template on a real Slurm, as the ordinary user: a rank is killed, the job is preempted, nothing begins again."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox

HERE = Path(__file__).parent
CHEAP = f"{sys.executable} {HERE / 'cheap_rank.py'}"
# an array's number comes after the command, and this rank takes a number for the code to fail with
DEAF = shlex.join(
    [
        sys.executable,
        "-c",
        f"import runpy, sys; del sys.argv[1:]; runpy.run_path({str(HERE / 'cheap_rank.py')!r}, run_name='__main__')",
    ]
)
PLAIN = HERE.parent.parent / "examples" / "plain_ddp.py"

Submit = Callable[..., tuple[str, Path]]


@pytest.fixture
def submit(sandbox: Sandbox, shared: Path) -> Submit:
    """Render as alice, submit as alice; the job's id and the run's folder."""

    def go(name: str, *task: str, **values: str) -> tuple[str, Path]:
        words = [f"--set={key}={value}" for key, value in {"partition": "low", "time": "20", **values}.items()]
        sandbox.exec(["slurm-resilience", "templates", "render", name, *words, "-o", "job.sbatch"], cwd=shared, check=True)
        job = sandbox.exec(["sbatch", "--parsable", "job.sbatch"], cwd=shared, check=True).stdout.strip()
        name = f"{job}_{task[0]}" if task else job
        return name, shared / "resilience-runs" / f"job-{name}"

    return go


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


def log_of(shared: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in shared.glob("resilient-*.out"))


def survive(sandbox: Sandbox, shared: Path, job: str, run_dir: Path) -> list[int]:
    """Kill a rank, then preempt it; the steps that it resumed from."""

    def resumed(times: int) -> list[dict[str, Any]]:
        found = events(run_dir, "resumed")
        return found if len(found) >= times else []

    def newer_checkpoint() -> bool:
        started = [event["t"] for event in events(run_dir, "attempt_started")]
        return any(event["t"] > max(started, default=0) for event in events(run_dir, "checkpoint_committed"))

    try:
        sandbox.wait_for(newer_checkpoint, 180, what="A checkpoint")
        sandbox.fault("kill-rank", job=sandbox.job(job)["JobId"])
        sandbox.wait_for(lambda: resumed(1), 180, what="The second attempt")
        sandbox.wait_for(newer_checkpoint, 180, what="A checkpoint of the second attempt")
        sandbox.fault("preempt", seconds=5.0)
        sandbox.wait_for(lambda: resumed(2), 240, what="The attempt after the preemption")
    except Exception as error:
        raise AssertionError(log_of(shared)) from error
    assert sandbox.job(job)["Restarts"] == "1"
    return [event["step"] for event in resumed(2)]


def ends_well(sandbox: Sandbox, shared: Path, job: str, within: float = 120) -> None:
    sandbox.wait_for(lambda: sandbox.job_state(job) in ("COMPLETED", "FAILED"), within, what="The end of the job")
    assert sandbox.job_state(job) == "COMPLETED", log_of(shared)


def test_a_rendered_template_runs(sandbox: Sandbox, shared: Path, submit: Submit) -> None:
    job, run_dir = submit("array", "2", array="2", command=DEAF, ranks_per_node="2", options="--set preload=[]")
    sandbox.wait_for(lambda: run_dir.is_dir() and events(run_dir, "started_fresh"), 150, what="The first step")
    (run_dir / "enough").touch()
    ends_well(sandbox, shared, job)


@pytest.mark.long
@pytest.mark.parametrize("name", ["single-node", "multi-node", "array", "container"])
def test_it_survives(name: str, sandbox: Sandbox, shared: Path, submit: Submit) -> None:
    more: dict[str, str] = {"nodes": "1-2"} if name in ("multi-node", "container") else {}
    if name == "container":
        (shared / "image").touch()
        more |= {"container": str(HERE / "without_slurm.sh"), "image": str(shared / "image")}
    task = ("1",) if name == "array" else ()
    more |= {"array": "1"} if task else {}
    command = DEAF if task else CHEAP
    job, run_dir = submit(name, *task, command=command, ranks_per_node="2", options="--set preload=[]", **more)
    steps = survive(sandbox, shared, job, run_dir)
    assert 0 < steps[0] < steps[1]
    (run_dir / "enough").touch()
    ends_well(sandbox, shared, job)
    assert len(events(run_dir, "started_fresh")) == 1


@pytest.mark.long
def test_a_script_that_knows_nothing_of_us_never_starts_from_scratch(sandbox: Sandbox, shared: Path, submit: Submit) -> None:
    """The example is a torchrun script; what it prints itself is what is believed here."""
    command = f"{sys.executable} {PLAIN} --epochs 40 --pause 0.1 --snapshot {{checkpoint}}"
    job, run_dir = submit("torchrun", command=command, nodes="1-2", ranks_per_node="1")
    steps = survive(sandbox, shared, job, run_dir)
    assert 0 < steps[0] < steps[1]
    ends_well(sandbox, shared, job, within=240)
    said = "\n".join(path.read_text() for path in sorted((run_dir / "logs").rglob("*")) if path.is_file())
    begun = [int(found) for found in re.findall(r"rank 0 of \d+ begins with epoch (\d+)", said)]
    assert min(begun) == 0
    assert begun.count(0) == 1, begun
    assert len(begun) == 3
    done = [int(found) for found in re.findall(r"^.*epoch (\d+) loss", said, flags=re.MULTILINE)]
    assert set(done) == set(range(40)), "every epoch was trained"
