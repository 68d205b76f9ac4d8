"""A run whose restored state passes every check and shows in its first steps; it goes back, in one process after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.observe.events import read_events
from slurm_resilience.training.guard import FirstStepsFailed
from slurm_resilience.training.metrics import history

from . import programs
from .forge import forged

LONG_ENOUGH = 20  # steps of history


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    if Run._current is not None:
        Run._current.close()


Change = Callable[[int, dict[str, float]], dict[str, float]]


def go(
    folder: Path, total: int, *, every: int = 5, change: Change | None = None, scale: float = 1.0, until: int | None = None,
    verify: dict[str, Any] | None = None, report: bool = True,
) -> Run:  # fmt: skip
    """Train as a new process would; ``change`` is a fault in what the steps give, ``until`` where this attempt dies."""
    if Run._current is not None:
        Run._current.close()
    torch.manual_seed(0)
    run = Run(folder=folder, checkpoint={"every_steps": every, "keep_last": 9, "background": False}, verify=verify)
    model = programs.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.register(model=model, optimizer=optimizer)
    run.resume()
    for step in run.steps(total):
        optimizer.zero_grad()
        x, y = programs.sample(range(4 * (step % 7), 4 * (step % 7) + 16))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        said = {"loss": float(loss.detach()) * scale, "grad_norm": float(norm)}
        if report:
            run.report(**(change(step + 1, said) if change else said))
        if until == step + 1:
            break
    return run


def usable(run: Run) -> list[int]:
    return sorted(entry.step for entry in CheckpointStore.open(run.folder / "checkpoints").entries() if entry.usable)


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == kind]


def test_a_state_that_only_its_steps_betray_sends_the_run_back(tmp_path: Path) -> None:
    go(tmp_path, 100, until=23)
    with forged(tmp_path / "checkpoints", digest=True) as it:
        for key, value in it.tensors.items():
            if key.startswith("model"):
                value.mul_(30.0)
    with pytest.raises(FirstStepsFailed, match=r"loss of step 21 under guard: expected .* as logged when it was taken before"):
        go(tmp_path, 100)
    assert usable(Run.current()) == [5, 10, 15]
    assert list(history(tmp_path))[-1] == 20
    after = go(tmp_path, 40)
    assert after.resumed is not None
    assert after.resumed.step == 15
    assert [event["verdict"] for event in told(tmp_path, "first_steps_checked")] == ["failed", "passed"]
    assert list(history(tmp_path)) == list(range(1, 41))


def test_without_a_log_to_replay_the_last_steps_tell(tmp_path: Path) -> None:
    go(tmp_path, 100, until=21)
    with forged(tmp_path / "checkpoints", digest=True) as it:
        for key, value in it.tensors.items():
            if key.startswith("model"):
                value.mul_(30.0)
    with pytest.raises(
        FirstStepsFailed, match=r"(loss|grad_norm) of step 23 under guard: expected at most .* 3 times in a row"
    ):
        go(tmp_path, 100, every=2)
    # What was taken from that state meanwhile is condemned with it.
    assert usable(Run.current()) == [5, 10, 15]
    reasons = [event["reason"] for event in told(tmp_path, "checkpoint_quarantined")]
    assert len(reasons) == 2
    assert "taken after the incident began" in reasons[1]


def test_nan_is_answered_at_once_and_entries_since_it_began_go_with_it(tmp_path: Path) -> None:
    def breaks(step: int, said: dict[str, float]) -> dict[str, float]:
        return {**said, "loss": math.nan} if step >= 18 else said

    go(tmp_path, 100, every=3, change=breaks, until=25)
    with pytest.raises(FirstStepsFailed, match="loss of step 25 under guard: expected a number, measured nan"):
        go(tmp_path, 100, every=3, change=breaks)
    assert usable(Run.current()) == [3, 6, 9, 12, 15]
    after = go(tmp_path, 30)
    assert after.resumed is not None
    assert after.resumed.step == 15
    assert told(tmp_path, "first_steps_checked")[-1]["verdict"] == "passed"


def test_a_run_that_does_it_again_from_an_older_checkpoint_is_let_go_on(tmp_path: Path) -> None:
    def diverges(step: int, said: dict[str, float]) -> dict[str, float]:
        return {**said, "loss": math.nan} if step >= 22 else said

    go(tmp_path, 100, until=21)
    with pytest.raises(FirstStepsFailed, match="step 22"):
        go(tmp_path, 100, change=diverges)
    assert usable(Run.current()) == [5, 10, 15]
    after = go(tmp_path, 40, change=diverges)
    assert after.outcome == "completed"
    last = told(tmp_path, "first_steps_checked")[-1]
    assert last["verdict"] == "inconclusive"
    assert "after going back for it, the same again" in last["reasons"][0]


def test_data_that_do_not_come_back_cost_one_way_back_and_no_checkpoint_more(tmp_path: Path) -> None:
    go(tmp_path, 100, until=23)
    with pytest.raises(FirstStepsFailed, match="step 21"):
        go(tmp_path, 100, scale=1.01)
    after = go(tmp_path, 40, scale=1.01)
    assert after.outcome == "completed"
    assert told(tmp_path, "first_steps_checked")[-1]["verdict"] == "inconclusive"


def test_the_only_checkpoint_is_not_condemned_for_a_loss_that_differs(tmp_path: Path) -> None:
    go(tmp_path, 100, every=20, until=23)
    after = go(tmp_path, 40, every=20, scale=1.01)
    assert after.outcome == "completed"
    assert "there is no older checkpoint" in told(tmp_path, "first_steps_checked")[0]["reasons"][0]


def test_who_reports_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go(tmp_path, 100, report=False, until=6)
    go(tmp_path, 30, report=False)
    (checked,) = told(tmp_path, "first_steps_checked")
    assert (checked["verdict"], checked["reasons"]) == ("inconclusive", ["loss was not reported", "grad_norm was not reported"])
    assert caplog.text.count("could not be compared in full") == 1


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    go(tmp_path, 100, until=23)
    assert go(tmp_path, 40, scale=1.5, verify={"first_steps": 0}).outcome == "completed"
    assert told(tmp_path, "first_steps_checked") == []


def test_what_was_rolled_back_at_loading_is_taken_back_in_the_log(tmp_path: Path) -> None:
    go(tmp_path, 100, until=23)
    with forged(tmp_path / "checkpoints", digest=True) as it:
        it.tensors["model.0.weight"][0, 0] = math.nan
    go(tmp_path, 100, until=17)
    assert list(history(tmp_path)) == list(range(1, 17))
