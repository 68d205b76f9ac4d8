"""What a person reads in slurm-%j.out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_resilience.observe.narrator import Narrator
from slurm_resilience.observe.vocabulary import EVENTS


def lines(*events: dict[str, Any]) -> list[str]:
    narrator = Narrator()
    told: list[str] = []
    for number, event in enumerate(events):
        told += narrator.lines({"t": 1_800_000_000.0 + number, "attempt": 1, "restart": 0, **event})
    return [line.partition("  ")[2] for line in told]


PLAN = {"mesh": {"dp_replicate": 1, "dp_shard": 3, "tp": 1}, "global_batch": 48, "micro_batch": 4, "accumulation": 4}
ODD_PLAN = {**PLAN, "global_batch": 50, "mesh": {"dp_shard": 7, "tp": 2}}


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "attempt_started", "attempt": 3, "nodes": ["n1", "n2", "n4"], "world": 3, "plan": PLAN},
            "attempt 3: 3 nodes (n1 n2 n4), 3 ranks, global batch 48 = 3 x 4 x 4",
        ),
        (
            {"event": "attempt_started", "nodes": ["n1"], "world": 1, "plan": ODD_PLAN},
            "attempt 1: 1 node (n1), 1 rank, global batch 50 on 7 shares in 4 passes of up to 4, mesh tp 2",
        ),
        (
            {"event": "attempt_started", "nodes": [f"n{i}" for i in range(64)], "world": 512, "plan": {}},
            "attempt 1: 64 nodes (n0 .. n63), 512 ranks",
        ),
        ({"event": "fault_detected", "cause": "rank_crash", "node": "n2", "rank": 1, "detail": "killed by SIGKILL"},
         "fault: rank_crash (rank 1, n2): killed by SIGKILL"),
        ({"event": "first_step", "step": 41, "loss": 0.98765}, "attempt 1: first step done (step 41, loss 0.9877)"),
        ({"event": "resumed", "step": 40, "checkpoint": "c", "seconds": 0.2}, "attempt 1: resumed at step 40 from c in 0.20 s"),
        ({"event": "run_failed", "cause": "oom", "reason": "big", "exit_code": 85}, "run ended: oom: big (exit code 85)"),
        ({"event": "requeue_started"}, "asking Slurm for a new allocation"),
        ({"event": "requeue_started", "nodes": [2, 4]}, "asking Slurm for a new allocation of 2-4 nodes"),
    ],
)  # fmt: skip
def test_a_line(event: dict[str, Any], line: str) -> None:
    assert lines(event) == [line]


def test_each_line_begins_with_the_time_of_day() -> None:
    (line,) = Narrator().lines({"t": 1_800_000_000.0, "attempt": 1, "restart": 0, "event": "run_completed", "step": 9})
    assert line == "08:00:00  run complete at step 9"


def test_progress_is_told_now_and_then_with_its_speed() -> None:
    reports = [{"event": "step_reported", "step": 4 * number, "loss": 1.0} for number in range(25)]
    assert lines(*reports) == ["step 40, loss 1.0000, 4.0 steps/s", "step 80, loss 1.0000, 4.0 steps/s"]
    slow = [{"event": "step_reported", "step": number // 5} for number in range(12)]
    assert lines(*slow) == ["step 2, 5.0 s/step"]


def test_checkpoints_are_told_now_and_then() -> None:
    saves = [
        {"event": "checkpoint_committed", "step": number, "name": f"s{number}", "bytes": 2_000_000, "seconds": 0.5}
        for number in range(12)
    ]
    assert lines(*saves) == [
        "checkpoint s0 at step 0 committed in 0.50 s, 2.0 MB",
        (
            "checkpoint s10 at step 10 committed in 0.50 s, 2.0 MB; since the last line about one, checkpoints at steps "
            "1 .. 9 (9 of them) were committed too"
        ),
    ]
    assert lines(*saves[:3], {"event": "run_completed", "step": 4})[-1] == (
        "run complete at step 4; since the last line about one, checkpoints at steps 1 2 were committed too"
    )


def test_a_checkpoint_that_is_not_used_is_told_with_its_reason() -> None:
    assert lines(
        {"event": "checkpoint_quarantined", "step": 30, "name": "s30", "reason": "weights: its data is damaged"},
        {"event": "checkpoint_passed_over", "step": 20, "name": "s20", "reason": "its manifest is damaged"},
    ) == [
        "checkpoint s30 is not used any more: weights: its data is damaged",
        "checkpoint s20 was passed over: its manifest is damaged",
    ]


def test_a_rank_whose_node_nobody_knows_is_told_without_one() -> None:
    assert lines({"event": "exception", "rank": 0, "type": "ValueError", "message": "x"}) == ["rank 0 raised ValueError: x"]
    assert lines({"event": "rank_quiet", "rank": 1, "node": None, "quiet_s": 5.0}) == [
        "rank 1 has shown no sign of life for 5 s"
    ]


def test_of_the_exceptions_of_an_attempt_the_first_is_told() -> None:
    raised = [{"event": "exception", "rank": rank, "node": "n1", "type": "ValueError", "message": "x"} for rank in range(3)]
    assert lines(*raised) == ["rank 0 on n1 raised ValueError: x"]
    assert len(lines(*raised, {**raised[0], "attempt": 2})) == 2


def test_a_recovery_is_told_with_its_phases() -> None:
    told = lines(
        {"event": "first_step", "step": 50},
        {"event": "fault_detected", "cause": "rank_crash", "node": "n2", "rank": 1},
        {"event": "attempt_stopped", "fault": True, "cause": "rank_crash", "node": "n2", "rank": 1, "step": 50},
        {"event": "ranks_launched"},
        {"event": "resumed", "step": 40, "checkpoint": "c"},
        {"event": "first_step", "step": 41},
    )
    phases = "detected 0.00, stopped 1.00, launched 2.00, loaded 3.00, first step 4.00"
    assert told[-1] == f"recovered from rank_crash (n2) in 4.00 s: {phases}; 10 steps to do again"


def test_what_was_told_before_a_restart_is_known_but_not_told_again() -> None:
    before = [
        {"t": 0.0, "attempt": 1, "restart": 0, "event": "first_step", "step": 5},
        {"t": 1.0, "attempt": 1, "restart": 0, "event": "fault_detected", "cause": "hang"},
    ]
    narrator = Narrator()
    narrator.catch_up(before)
    told = narrator.lines({"t": 4.0, "attempt": 2, "restart": 0, "event": "first_step", "step": 6})
    assert "recovered from hang in 3.00 s" in told[-1]


def test_all_agents_here_is_told_once() -> None:
    joined = [{"event": "agent_joined", "node": node} for node in ("n1", "n2", "n1")]
    told = lines({"event": "allocation_started", "nodes": ["n1", "n2"], "job_id": "7"}, *joined)
    assert told == ["job 7: 2 nodes (n1 n2)", "all 2 agents are here", "n1: its agent is back"]


def test_no_event_of_the_vocabulary_breaks_it_with_the_fields_it_may_leave_out() -> None:
    needed = {
        "nodes": ["n1", "n2"], "seconds": 1.0, "node": "n1", "why": "w", "exit_code": 1, "detail": "d", "world": 1,
        "cause": "hang", "signal": "SIGTERM", "source": "n1", "ended": 0, "rank": 0, "action": "launch", "reason": "r",
        "own_s": 0.3, "others_s": 0.1, "times": 3.0, "quiet_s": 1.0, "quiet_limit_s": 900.0, "ranks": 2,
        "deadline": 1_800_000_100.0,
    }  # fmt: skip
    told = set()
    for name, meaning in EVENTS.items():
        fields = {key: value for key, value in needed.items() if key in meaning.fields or key == "rank"}
        told |= {name for line in lines({"event": name, **fields}) if line}
    assert {"run_failed", "attempt_started", "exception", "warning_explained"} <= told


def test_an_unknown_event_says_nothing() -> None:
    assert lines({"event": "of_a_newer_release", "x": json}) == []


def test_a_long_message_is_told_once() -> None:
    message = "The checkpoint is about another model. " * 3
    detail = f"MismatchedCheckpoint: {message}"
    told = lines(
        {"event": "exception", "rank": 1, "node": "n1", "type": "MismatchedCheckpoint", "message": message},
        {"event": "exception", "rank": 0, "node": "n1", "type": "MismatchedCheckpoint", "message": f"{message} told by nobody"},
        {"event": "fault_detected", "cause": "bad_checkpoint", "node": "n1", "rank": 1, "detail": detail},
        {"event": "attempt_stopped", "fault": True, "cause": "bad_checkpoint", "node": "n1", "rank": 1, "detail": detail},
        {"event": "decided", "action": "stop", "reason": f"n1: {detail}: trying again would end the same way"},
        {"event": "run_failed", "cause": "bad_checkpoint", "reason": f"n1: {detail}: as ever", "exit_code": 84},
    )
    assert [message in line for line in told] == [True, False, False, False, False]
    assert all("MismatchedCheckpoint: as told above" in line for line in told[1:])


def test_a_cancel_says_who_had_saved_and_names_its_cause_once() -> None:
    assert lines({"event": "stop_deadline_passed", "ended": 0, "saved": 3, "world": 3}) == [
        "the time to stop is over: 0 of 3 ranks have ended, 3 of 3 had saved and said so; what still runs is killed"
    ]
    reason = "cancelled (JobState=CANCELLED): the run ends here"
    assert lines({"event": "run_failed", "cause": "cancelled", "reason": reason, "exit_code": 86}) == [
        f"run ended: {reason} (exit code 86); started again in this folder, it goes on"
    ]


def test_a_step_that_was_never_taken_is_not_named() -> None:
    assert lines({"event": "run_completed", "step": -1}) == ["run complete"]


def test_an_event_that_lacks_what_its_line_needs_is_shown_as_it_is() -> None:
    assert lines({"event": "agent_lost", "node": "n2"}) == ["agent_lost: {'attempt': 1, 'node': 'n2'}"]
    assert lines({"event": "attempt_started", "nodes": ["n1"], "world": 1, "plan": {"global_batch": 8}})[0].startswith(
        "attempt_started: "
    )


def test_a_report_of_the_next_attempt_says_nothing_of_its_speed() -> None:
    """It may come before the first step of all ranks is told."""
    reports = [{"event": "step_reported", "step": step} for step in range(10, 20)]
    again = [{"event": "step_reported", "attempt": 2, "step": step} for step in range(1, 12)]
    assert lines(*reports, *again) == ["step 11, 1.0 steps/s"]


def test_one_checkpoint_that_was_not_told_of() -> None:
    saves = [{"event": "checkpoint_committed", "step": number, "name": f"s{number}"} for number in (1, 2)]
    assert lines(*saves, {"event": "run_completed", "step": 2})[-1] == (
        "run complete at step 2; since the last line about one, a checkpoint at step 2 was committed too"
    )


def test_a_stop_whose_cause_is_still_asked_for_is_called_nothing() -> None:
    stopped = {"t": 1.0, "event": "attempt_stopped", "attempt": 1, "saved": True, "step": 9}
    assert "(unknown)" not in "".join(Narrator().lines({**stopped, "cause": "unknown"}))
    assert "(preemption)" in "".join(Narrator().lines({**stopped, "cause": "preemption"}))
