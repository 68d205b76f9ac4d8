"""From records to an explanation, and to its page: who, where, why, what was done, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli import main
from slurm_resilience.observe.events import read_events
from slurm_resilience.observe.explain import explain, stories
from slurm_resilience.observe.explain_page import page
from slurm_resilience.observe.narrator import Narrator
from slurm_resilience.observe.run_metrics import RunMetrics
from slurm_resilience.runtime.history import History

T = 1_800_000_000.0


def run(folder: Path, *events: dict[str, Any], record: dict[str, Any] | None = None) -> Path:
    """A run folder with these events; times and sequence are filled in."""
    folder.mkdir(exist_ok=True)
    with open(folder / "events.jsonl", "w") as file:
        lines = [{"v": 1, "seq": at, "t": T + at, "restart": 0, "attempt": 1, **event} for at, event in enumerate(events, 1)]
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "run.json").write_text("{}")
    if record is not None:
        (folder / "incidents").mkdir()
        (folder / "incidents" / "0001.json").write_text(json.dumps({"v": 1, "attempt": 1, **record}))
    return folder


def crash(rank: int | None = 1, **more: Any) -> list[dict[str, Any]]:
    """One incident from its fault to the first step after it."""
    return [
        {"event": "ranks_launched", "world": 2},
        {"event": "first_step", "step": 1},
        {"event": "step_reported", "step": 12, "rank": 0},
        {"event": "fault_detected", "cause": "rank_crash", "node": "n2", "rank": rank, "detail": "d", "since": T + 3.5, **more},
        {
            "event": "attempt_stopped",
            "fault": True,
            "cause": "rank_crash",
            "node": "n2",
            "rank": rank,
            "detail": "boom",
            **more,
        },
        {"event": "decided", "action": "launch", "reason": "2 nodes"},
        {"event": "attempt_started", "attempt": 2, "nodes": ["n1", "n2"], "world": 2, "plan": {}},
        {"event": "resumed", "attempt": 2, "step": 10, "checkpoint": "step-10"},
        {"event": "first_step", "attempt": 2, "step": 11},
        {"event": "decided", "attempt": 2, "action": "grow", "reason": "later, and none of its business"},
    ]


def raised(rank: int, kind: str, message: str) -> dict[str, Any]:
    trace = f"Traceback (most recent call last):\n  File train.py\n{kind}: {message}\n"
    return {"event": "exception", "rank": rank, "node": f"n{rank + 1}", "type": kind, "message": message, "traceback": trace}


def test_the_exception_of_the_rank_that_is_named_came_first_and_the_rest_are_echoes(tmp_path: Path) -> None:
    events = crash()
    events[3:3] = [raised(0, "RuntimeError", "Connection reset by peer"), raised(1, "ValueError", "boom")]
    (found,) = explain(run(tmp_path, *events))
    assert found.first is not None
    assert (found.first["type"], found.first["rank"]) == ("ValueError", 1)
    assert [each["rank"] for each in found.echoes] == [0]
    text = page(found, number=1, of=1)
    assert text.index("ValueError: boom  (rank 1 on n2") < text.index("rank 0 on n1: RuntimeError: Connection reset")
    assert "Incident 1 of 1: rank_crash, rank 1 on n2" in text
    assert "it resumed at step 10 from step-10; 2 steps to do again" in text
    assert "launch: 2 nodes" in text
    assert "none of its business" not in text


def test_a_rank_that_died_without_a_word_raised_nothing(tmp_path: Path) -> None:
    events = crash()
    events[3:3] = [raised(0, "RuntimeError", "Connection reset by peer")]
    end = {"rank": 1, "node": "n2", "code": -11, "signal": "SIGSEGV", "t": T, "step": 12, "oom": "", "tail": ["a", "b"]}
    (found,) = explain(run(tmp_path, *events, record={"ends": [end], "kernel": {"n2": ["[1.0] train.py segfault at 0"]}}))
    assert found.first is None
    text = page(found, number=1, of=1)
    assert "rank 1 on n2: killed by SIGSEGV" in text
    assert "n2: [1.0] train.py segfault at 0" in text
    assert "| b" in text


def test_what_is_raised_after_a_node_was_lost_is_an_echo(tmp_path: Path) -> None:
    events = crash(rank=None)
    events[4:4] = [raised(1, "RuntimeError", "Connection closed by peer")]
    (found,) = explain(run(tmp_path, *events))
    assert found.first is None
    assert [each["rank"] for each in found.echoes] == [1]


def test_saves_that_failed_before_it_are_told(tmp_path: Path) -> None:
    """The exception only says that there was no last checkpoint; why stands in the event."""
    events = crash()
    events[3:3] = [{"event": "checkpoint_failed", "step": step, "error": "No space left on device"} for step in (5, 10)]
    (found,) = explain(run(tmp_path, *events))
    text = " ".join(page(found, number=1, of=1).split())
    assert "the checkpoint of step 10 failed: No space left on device; so did 1 before it" in text
    assert len(found.as_dict()["failed_saves"]) == 2


def test_records_that_are_missing_torn_or_newer_are_done_without(tmp_path: Path) -> None:
    folder = run(tmp_path, *crash(), record={})
    assert explain(folder)[0].record is not None
    (folder / "incidents" / "0001.json").write_text('{"v": 1, "ends": [')
    assert explain(folder)[0].record is None
    (folder / "incidents" / "0001.json").write_text('{"v": 9}')
    (found,) = explain(folder)
    assert found.record is None
    assert "boom" in page(found, number=1, of=1)


def test_a_supervisor_that_died_is_an_incident_of_its_own_even_when_nothing_was_lost() -> None:
    events = [
        {"event": "ranks_launched", "t": T, "attempt": 1, "restart": 0, "world": 2},
        {"event": "step_reported", "t": T + 1, "attempt": 1, "restart": 0, "step": 7},
        {"event": "supervisor_restarted", "t": T + 3, "attempt": 1, "restart": 0, "nodes": ["n1"]},
        {"event": "attempt_adopted", "t": T + 4, "attempt": 1, "restart": 0, "nodes": ["n1"], "world": 2},
        {"event": "step_reported", "t": T + 5, "attempt": 1, "restart": 0, "step": 9},
    ]
    (found,) = stories(events)
    assert (found.cause, found.incident.recovered, found.incident.step) == ("supervisor_lost", True, 7)
    text = page(found, number=1, of=1)
    assert "all ranks had gone on" in text
    assert "let it go on; nothing was lost" in text


def test_a_run_that_failed_before_any_attempt_is_explained_too(tmp_path: Path) -> None:
    failed = {"event": "run_failed", "cause": "config_error", "reason": "no such interpreter", "exit_code": 78}
    (found,) = explain(run(tmp_path, {"event": "allocation_started", "nodes": ["n1"], "job_id": "7"}, failed))
    assert found.cause == "config_error"
    text = page(found, number=1, of=1)
    assert "what was asked for cannot work" in text
    assert "exit code 78" in text
    assert "did not come back" in text


def test_the_command_prints_pages_or_one_document(tmp_path: Path, capsys: Any) -> None:
    folder = run(tmp_path / "run", *crash(), record={"doing": [{"ranks": [0], "what": "waits"}]})
    assert main(["explain", str(folder)]) == 0
    assert "rank 0: waits" in capsys.readouterr().out
    assert main(["explain", str(folder), "--json", "--incident", "-1"]) == 0
    document = json.loads(capsys.readouterr().out)
    (found,) = document["incidents"]
    assert (found["number"], found["cause"], found["rank"], found["node"], found["resumed_step"]) == (
        1,
        "rank_crash",
        1,
        "n2",
        10,
    )
    assert [each["action"] for each in found["decisions"]] == ["launch"]
    assert main(["explain", str(folder), "--incident", "2"]) == 78
    assert main(["explain", str(tmp_path / "nothing")]) == 78
    calm = run(tmp_path / "calm", {"event": "run_completed", "step": 5})
    assert main(["explain", str(calm)]) == 0
    assert "no incidents" in capsys.readouterr().out


def test_a_run_that_was_cancelled_and_taken_up_again_later(tmp_path: Path) -> None:
    cancelled = [
        *crash()[:3],
        {"event": "warning_received", "signal": "SIGTERM"},
        {"event": "warning_explained", "cause": "cancelled", "detail": "scancel"},
        {"event": "attempt_stopped", "fault": False, "cause": "cancelled"},
        {"event": "run_failed", "cause": "cancelled", "reason": "the run ends here", "exit_code": 86},
    ]
    again = [
        {"event": "allocation_started", "nodes": ["n1"], "job_id": "8", "t": T + 7300},
        *({**event, "attempt": 2, "t": T + 7400 + at} for at, event in enumerate(crash()[:3])),
    ]
    (ended,) = explain(run(tmp_path / "a", *cancelled))
    assert "; ended on purpose" in page(ended, number=None, of=0)
    (found,) = explain(run(tmp_path / "b", *cancelled, *again))
    assert (found.taken_up, found.incident.recovered) == (T + 7300, False)
    assert "ended on purpose; the run was taken up again 2.0 h later" in " ".join(page(found, number=None, of=0).split())


def test_the_reason_of_an_end_is_told_once(tmp_path: Path) -> None:
    end = {"event": "run_failed", "cause": "config_error", "reason": "12 does not divide by 5", "exit_code": 78, "attempt": 0}
    (found,) = explain(run(tmp_path / "run", end))
    text = page(found, number=1, of=1)
    assert text.count("12 does not divide by 5") == 1
    assert "the run ended with exit code 78" in text


def test_the_cause_comes_first_and_what_it_says_is_not_said_again(tmp_path: Path) -> None:
    events = crash()
    events[3:3] = [raised(1, "ValueError", "boom")]
    events[5]["detail"] = "ValueError: boom"
    (found,) = explain(run(tmp_path / "a", *events))
    assert "\nwhy " not in page(found, number=1, of=1)
    events[5]["detail"] = "exited with 1"
    (found,) = explain(run(tmp_path / "b", *events))
    text = page(found, number=1, of=1)
    assert text.index("\nfirst ") < text.index("\nwhy ")
    assert "exited with 1" in text


def test_a_checkpoint_that_was_passed_over_is_told(tmp_path: Path, capsys: Any) -> None:
    events = crash()
    passed = {"event": "checkpoint_passed_over", "attempt": 2, "step": 12, "name": "step-12", "reason": "its manifest is torn"}
    events[7:7] = [passed]
    folder = run(tmp_path / "run", *events)
    assert "checkpoint step-12 was passed over: its manifest is torn" in page(explain(folder)[0], number=1, of=1)
    assert main(["explain", str(folder), "step-12"]) == 0
    assert "attempt 2 passed it over, because its manifest is torn" in " ".join(capsys.readouterr().out.split())


MOVED = [
    {"event": "ranks_launched", "world": 2},
    {"event": "first_step", "step": 1},
    {"event": "warning_received", "signal": "SIGTERM", "source": "n2"},
    {
        "event": "warning_explained",
        "cause": "unknown",
        "by_hand": "moved by `slurm-resilience requeue`",
        "detail": "moved by `slurm-resilience requeue`; Restarts=1",
        "requeued": True,
        "deadline": T + 30.0,
    },
    {"event": "attempt_stopped", "cause": "unknown", "by_hand": "moved by `slurm-resilience requeue`"},
    {"event": "requeue_done"},
]
BACK = [
    {"event": "allocation_started", "nodes": ["n3"], "restart": 1},
    {"event": "attempt_started", "attempt": 2, "nodes": ["n3"], "world": 2},
    {"event": "first_step", "attempt": 2, "step": 13},
]


def test_who_moved_the_run_by_hand_is_told_everywhere_and_is_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "moved", *MOVED)
    (tmp_path / "moved" / "run.json").write_text(
        '{"v": 1, "run_id": "r", "argv": ["x"], "config": {"budgets": {"node_lost": 2}}}'
    )
    assert main(["status", str(folder)]) == 0
    waiting = " ".join(capsys.readouterr().out.split())
    assert "back in its queue: requeued (moved by `slurm-resilience requeue`" in waiting
    run(folder, *MOVED, *BACK)
    assert main(["status", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "incidents none" in shown
    assert "moved by `slurm-resilience requeue`: back in 6" in shown
    assert main(["explain", str(folder)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Moved on purpose: requeued")
    assert "somebody put the job back into the queue" in told
    assert main(["report", str(folder), "--output", str(folder / "report.html")]) == 0
    capsys.readouterr()
    assert "without an incident and one requeue by hand" in (folder / "report.html").read_text()
    narrator = Narrator()
    log = [line for event in read_events(folder) for line in narrator.lines(event)]
    assert any("training again 6.00 s after the requeue by hand" in line for line in log)
    assert not any("recovered" in line for line in log)
    assert any("why: requeued (moved by `slurm-resilience requeue`" in line for line in log)
    assert any("attempt 1: stopped, not all ranks had saved (requeued)" in line for line in log)
    assert explain(folder)[0].as_dict()["cause"] == "requeued"
    metrics = RunMetrics("r")
    for event in read_events(folder):
        metrics.apply(event)
    assert not [row for row in metrics.rows() if row[0] == "incidents_total"]
    history = History.replay(read_events(folder))
    assert (history.faults, history.excused) == ([], [1])
