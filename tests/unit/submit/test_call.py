"""What a rank does with a submitted function, run as a rank is run: a process of its own, with the real ``Run``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.payload import CallFolder, Result


def train(run: Any, steps: int, *, stop_at: int | None = None, say: bool = False, fail_at: int | None = None) -> Any:
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.register(model=model, optimizer=optimizer)
    run.resume()
    for step in run.steps(steps):
        if step == fail_at:
            raise ValueError(f"bad data at {step}")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.report(loss=1.0)
        if step == stop_at:
            break
    if say:
        run.finish()
    return {"outcome": run.outcome, "step": run.step}


def preempted(run: Any) -> str:
    """Asked to stop in the middle, by the signal that a run without an agent obeys."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGTERM)
    train(run, 5)
    return f"half, {run.outcome}"


@pytest.fixture
def called(tmp_path: Path) -> Callable[..., tuple[CallFolder, subprocess.CompletedProcess[str]]]:
    """Run a function as ``submit.call`` does, in the run folder of this test."""

    def run(function: Any, *args: Any, **kwargs: Any) -> tuple[CallFolder, subprocess.CompletedProcess[str]]:
        folder = CallFolder(tmp_path / "call")
        folder.write(function, args, kwargs)
        done = subprocess.run(
            [sys.executable, "-m", "slurm_resilience.submit.call", str(folder.path)],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return folder, done

    return run


def test_the_result_of_a_run_that_came_to_its_end(called: Callable[..., Any]) -> None:
    folder, done = called(train, 3)
    assert done.returncode == 0, done.stderr
    assert folder.read_result() == Result(1, {"outcome": "completed", "step": 3})
    # once more, as after a requeue that came too late: nothing is trained, and the result stays that of the real end
    folder, done = called(train, 3)
    assert done.returncode == 0, done.stderr
    assert folder.read_result() == Result(1, {"outcome": "completed", "step": 3})


def test_a_run_that_was_asked_to_stop_has_no_result(called: Callable[..., Any]) -> None:
    folder, done = called(preempted)
    assert done.returncode == 0, done.stderr
    assert folder.read_result() is None
    assert folder.last_error() is None


def test_an_exception_fails_the_attempt_and_is_kept(called: Callable[..., Any]) -> None:
    folder, done = called(train, 3, fail_at=1)
    assert done.returncode == 1
    assert folder.read_result() is None
    error = folder.last_error()
    assert error is not None
    assert (error["type"], error["message"], error["rank"]) == ("ValueError", "bad data at 1", 0)
    assert "bad data at 1" in error["traceback"]


def test_a_loop_that_was_left_early_is_no_end_unless_it_says_so(called: Callable[..., Any]) -> None:
    folder, done = called(train, 9, stop_at=1)
    assert done.returncode != 0
    assert folder.read_result() is None
    assert "run.finish()" in done.stderr
    folder, done = called(train, 9, stop_at=3, say=True)
    assert done.returncode == 0, done.stderr
    result = folder.read_result()
    assert result is not None
    assert result.value["outcome"] == "completed"


def test_a_function_without_a_loop_is_finished_when_it_returns(called: Callable[..., Any]) -> None:
    folder, done = called(lambda run, a: (run.rank, a), 7)
    assert done.returncode == 0, done.stderr
    result = folder.read_result()
    assert result is not None
    assert result.value == (0, 7)


def test_what_cannot_be_sent_back_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a lock, cannot be sent back"):
        CallFolder(tmp_path).write_result(Result(1, threading.Lock()))


def test_a_module_beside_the_submitters_script_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "project"
    elsewhere.mkdir()
    (elsewhere / "of_mine.py").write_text("def answer(run):\n    return 42\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    import of_mine  # type: ignore[import-not-found]

    folder = CallFolder(tmp_path / "call")
    folder.write(of_mine.answer, (), {})
    ask = "import sys; from slurm_resilience.submit.payload import CallFolder as F; f = F(sys.argv[1]); "
    for extend, code in (("", 1), ("f.extend_path(); ", 0)):
        done = subprocess.run(
            [sys.executable, "-c", f"{ask}{extend}print(f.read().function(None))", str(folder.path)],
            cwd="/", capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    assert done.stdout == "42\n"
