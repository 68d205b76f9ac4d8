"""How a run stands, folded from its events, and the reading of a file that holds millions of step reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import FILE_NAME, EventWriter, read_events, read_for_standing
from slurm_resilience.observe.standing import Standing, look_for_supervisor
from slurm_resilience.runtime.epochs import beat

Facts = list[tuple[str, dict[str, Any]]]

START: Facts = [
    ("run_started", {"run_id": "r-1", "argv": ["python", "train.py"]}),
    ("allocation_started", {"nodes": ["n1", "n2"], "job_id": "7"}),
]
JOINED: Facts = [("agent_joined", {"node": node, "warm": False, "reason": "it is still importing"}) for node in ("n1", "n2")]
WARM: Facts = [("agent_warm", {"node": node, "warm": True}) for node in ("n1", "n2")]
LAUNCH: Facts = [("attempt_started", {"nodes": ["n1", "n2"], "world": 2, "plan": {}}), ("ranks_launched", {"world": 2})]
TRAIN: Facts = [("started_fresh", {}), ("first_step", {"step": 1, "loss": 0.7}), ("step_reported", {"step": 11, "loss": 0.6})]
SAVE: Facts = [
    ("checkpoint_started", {"step": 12}),
    ("checkpoint_committed", {"step": 12, "name": "c12", "bytes": 10, "seconds": 0.1}),
]
FAULT: Facts = [
    ("fault_detected", {"cause": "node_lost", "node": "n2", "detail": "silent"}),
    ("agent_lost", {"node": "n2", "why": "silent"}),
]


def told(*parts: Facts) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    attempt = 0
    for name, fields in (fact for part in parts for fact in part):
        attempt += name == "attempt_started"
        out.append({"t": 100.0 + len(out), "event": name, "attempt": attempt, "restart": 0, **fields})
    return out


@pytest.mark.parametrize(
    ("parts", "doing"),
    [
        ([], "queued"),
        ([START], "starting"),
        ([START, JOINED, WARM, LAUNCH], "loading"),
        ([START, WARM, LAUNCH, TRAIN], "training"),
        ([START, WARM, LAUNCH, TRAIN, SAVE[:1]], "saving"),
        ([START, WARM, LAUNCH, TRAIN, SAVE], "training"),
        ([START, WARM, LAUNCH, TRAIN, SAVE[:1], [("checkpoint_failed", {"step": 12, "error": "full"})]], "training"),
        ([START, WARM, LAUNCH, TRAIN, FAULT], "stopping"),
        ([START, WARM, LAUNCH, TRAIN, FAULT, [("attempt_stopped", {"cause": "node_lost", "fault": True})]], "deciding"),
        ([START, [("decided", {"action": "requeue", "reason": "too few"})]], "requeueing"),
        ([START, [("requeue_started", {}), ("requeue_done", {})]], "queued"),
        ([START, [("run_completed", {"step": 9})]], "complete"),
        ([START, [("run_failed", {"cause": "hang", "reason": "often", "exit_code": 1})]], "failed"),
    ],
)
def test_what_a_run_does_now(parts: list[Any], doing: str) -> None:
    assert Standing.of(told(*parts)).doing == doing


def test_everything_that_one_looks_for() -> None:
    standing = Standing.of(told(START, JOINED, WARM, LAUNCH, TRAIN, SAVE, FAULT))
    assert (standing.run_id, standing.job_id, standing.attempt, standing.world) == ("r-1", "7", 1, 2)
    assert (standing.step, standing.loss) == (11, 0.6)
    assert standing.step_s == pytest.approx(0.1)  # ten steps in one second
    assert standing.newest is not None
    assert (standing.newest.step, standing.newest.name) == (12, "c12")
    assert {name: node.agent for name, node in standing.nodes.items()} == {"n1": "warm", "n2": "lost"}
    assert [incident.cause for incident in standing.incidents] == ["node_lost"]
    assert "silent" in standing.because
    assert "n2" in standing.because


def test_how_long_counts_from_the_change_not_from_the_last_word() -> None:
    standing = Standing.of(told(START, WARM, LAUNCH, TRAIN, [("step_reported", {"step": 30})]))
    first_step = next(event for event in told(START, WARM, LAUNCH, TRAIN) if event["event"] == "first_step")
    assert standing.since == first_step["t"]


def test_training_goes_on_through_its_checkpoints() -> None:
    standing = Standing.of(told(START, WARM, LAUNCH, TRAIN, SAVE, [("step_reported", {"step": 30})]))
    first_step = next(event for event in told(START, WARM, LAUNCH, TRAIN) if event["event"] == "first_step")
    assert (standing.doing, standing.since) == ("training", first_step["t"])
    saving = Standing.of(told(START, WARM, LAUNCH, TRAIN, SAVE, SAVE[:1]))
    assert saving.since != first_step["t"]


@pytest.mark.parametrize(
    ("parts", "age_s", "doing"),
    [
        ([START, WARM, LAUNCH, TRAIN], 400.0, "unsupervised"),
        ([START, WARM, LAUNCH, TRAIN], 5.0, "training"),
        ([START, WARM, LAUNCH, TRAIN], None, "training"),
        ([START, WARM, LAUNCH, TRAIN, [("run_completed", {"step": 30})]], 400.0, "complete"),
        ([START, WARM, LAUNCH, TRAIN, [("requeue_done", {})]], 400.0, "queued"),
    ],
)
def test_a_run_whose_supervisor_gives_no_sign_does_not_train(
    tmp_path: Path, parts: list[Any], age_s: float | None, doing: str
) -> None:
    if age_s is not None:
        beat(tmp_path, 1, 1)
        os.utime(tmp_path / "pulse", (1000.0, 1000.0))
    standing = Standing.of(told(*parts))
    look_for_supervisor(standing, tmp_path, now=1000.0 + (age_s or 0.0))
    assert standing.doing == doing
    if doing == "unsupervised":
        assert standing.because.startswith("no sign of its supervisor for 6.7 min, it ended without a word (training, ")
        assert standing.since == 1000.0


def test_a_new_allocation_forgets_the_nodes_of_the_last() -> None:
    again = [("allocation_started", {"nodes": ["n3"], "job_id": "7"})]
    assert list(Standing.of(told(START, WARM, LAUNCH, TRAIN, again)).nodes) == ["n3"]


def test_facts_of_a_later_release_change_nothing() -> None:
    events = told(START, WARM, LAUNCH, TRAIN)
    assert Standing.of([*events, {"t": 200.0, "event": "moon_rose", "attempt": 1, "restart": 0}]).doing == "training"


def test_reading_for_the_standing_leaves_the_mass_of_steps_out_and_gives_the_same(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, restart=0)
    for event in told(START, JOINED, WARM, LAUNCH, TRAIN):
        writer.write(
            event["event"],
            t=event["t"],
            **{
                key: value
                for key, value in event.items()
                if key in ("nodes", "world", "node", "warm", "step", "loss", "job_id", "run_id", "argv")
            },
        )
    for step in range(12, 1000):
        writer.write("step_reported", t=200.0 + step, step=step, loss=1 / step)
    writer.write("checkpoint_committed", t=2000.0, step=999, name="c", seconds=1.0)
    for step in range(1000, 2000):
        writer.write("step_reported", t=2000.0 + step, step=step, loss=1 / step)
    writer.close()
    few, every = list(read_for_standing(tmp_path)), list(read_events(tmp_path))
    assert len(every) > 1900
    assert len(few) < 25
    assert Standing.of(few) == Standing.of(every)
    assert [event["seq"] for event in few] == sorted(event["seq"] for event in few)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    fact = json.dumps({"v": 1, "seq": 1, "t": 1.0, "restart": 0, "attempt": 0, "event": "run_started"})
    (tmp_path / FILE_NAME).write_text(fact + '\n{"v": 1, "seq": 2, "event": "step_re')
    assert [event["event"] for event in read_for_standing(tmp_path)] == ["run_started"]
    assert list(read_for_standing(tmp_path / "nowhere")) == []
