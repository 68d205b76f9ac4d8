"""``cluster="local"``: the same script and the same object, with pretend nodes on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience import ResilientJob, submit_resilient
from slurm_resilience.errors import Cause, ConfigError


def add(run: Any, a: int, b: int) -> dict[str, int]:
    print(f"rank {run.rank} adds", flush=True)
    return {"sum": a + b, "world": run.world_size}


def wait_for_ever(run: Any, sign: str) -> None:
    Path(sign).touch()
    while True:
        time.sleep(0.05)


def test_a_function_on_two_pretend_nodes(tmp_path: Path) -> None:
    """In a folder whose name Slurm could not take."""
    job = submit_resilient(add, 40, 2, nodes=2, folder=tmp_path / "runs", cluster="local")
    assert job.wait(timeout=200)
    assert job.exception() is None, job.stderr()
    assert job.result() == {"sum": 42, "world": 2}
    assert job.state == "COMPLETED"
    assert "rank 0 adds" in (job.stdout() or "")
    assert "rank 1 adds" in (job.stdout(rank=1) or "")
    again = ResilientJob[Any].from_dir(job.run_dir)
    assert again.done()
    assert again.result() == {"sum": 42, "world": 2}


def test_cancelled(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    job = submit_resilient(
        wait_for_ever, str(sign), folder=tmp_path / "runs", cluster="local", config={"limits.stop_grace_s": 2}
    )
    deadline = time.monotonic() + 200
    while not sign.exists():
        assert time.monotonic() < deadline, job.stderr()
        assert not job.done(), job.stderr()
        time.sleep(0.05)
    assert job.state == "RUNNING"
    job.cancel()
    assert job.wait(timeout=200)
    failure = job.exception()
    assert failure is not None
    assert failure.cause is Cause.CANCELLED
    assert job.state == "CANCELLED"


def test_parameters_of_slurm_are_checked_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'partition'"):
        submit_resilient(add, 1, 2, folder=tmp_path / "runs", cluster="local", partion="low")
    assert not (tmp_path / "runs").exists()
