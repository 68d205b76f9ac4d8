"""A budget cannot be escaped by dying: the history is the same fold over events, live and after a restart."""

from __future__ import annotations

from typing import Any

from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.runtime.history import History
from tests.unit.runtime.stage import Stage


def replay(*events: tuple[str, dict[str, Any]]) -> History:
    return History.replay({"event": name, "attempt": 1, "restart": 0, **fields} for name, fields in events)


def fault(cause: str = "rank_crash", **fields: Any) -> tuple[str, dict[str, Any]]:
    return "attempt_stopped", {"fault": True, "cause": cause, **fields}


def saved(step: int) -> tuple[str, dict[str, Any]]:
    return "checkpoint_committed", {"step": step}


def test_only_a_newer_checkpoint_is_progress() -> None:
    assert replay(fault(), saved(10)).count("rank_crash") == 0
    assert replay(saved(10), fault(), saved(10), saved(5)).count("rank_crash") == 1
    assert replay(saved(10), fault(), fault("hang"), saved(11)).faults == []


def test_stops_that_were_asked_for_are_no_faults() -> None:
    history = replay(("attempt_stopped", {"fault": False, "cause": "preemption"}))
    assert history.faults == []


def test_signatures_count_in_a_row_only() -> None:
    same, other = {"signature": "ValueError: x at step 3"}, {"signature": "KeyError: y at step 3"}
    assert replay(fault(**same), fault(**same)).same_signature() == 2
    assert replay(fault(**same), fault(**other)).same_signature() == 1
    assert replay(fault(**same), saved(3), fault(**same)).same_signature() == 1
    assert replay(fault(), fault()).same_signature() == 0


def test_the_attempt_that_a_dead_supervisor_left_is_open() -> None:
    started = ("attempt_started", {"nodes": ["n1"], "plan": {}})
    opened = replay(started).open_attempt
    assert opened is not None
    assert opened["nodes"] == ["n1"]
    assert replay(started, fault()).open_attempt is None
    assert replay(started, ("allocation_started", {"job_id": "8"})).open_attempt is None


def test_somebody_who_submits_a_failed_run_again_starts_with_full_budgets() -> None:
    failed = (fault(), fault(), ("run_failed", {"cause": "rank_crash"}))
    first = ("allocation_started", {"job_id": "7"})
    assert replay(first, *failed, ("allocation_started", {"job_id": "8"})).faults == []
    assert len(replay(first, *failed, ("allocation_started", {"job_id": "7", "restart": 1})).faults) == 2
    assert len(replay(first, fault(), ("allocation_started", {"job_id": "8"})).faults) == 1


def test_supervisors_that_die_are_counted_until_there_is_progress() -> None:
    died = ("supervisor_restarted", {})
    assert replay(died, died).supervisor_restarts == 2
    assert replay(died, saved(1), died).supervisor_restarts == 1


def test_replaying_the_file_gives_the_history_that_wrote_it(tmp_path: Any) -> None:
    writer, live = EventWriter(tmp_path, restart=3), History()
    for name, fields in [
        ("allocation_started", {"job_id": "7", "nodes": ["n1"]}),
        fault(node="n1", signature="s"),
        saved(4),
        fault("hang", node="n2"),
    ]:
        live.apply(writer.write(name, attempt=2, **fields))
    assert History.replay(read_events(tmp_path)) == live
    assert live.restart == 3


def test_an_attempt_goes_back_when_it_condemns_what_it_had_resumed_from() -> None:
    started, resumed, gone = (
        ("attempt_started", {"plan": {}}),
        ("resumed", {"step": 4}),
        ("checkpoint_quarantined", {"step": 4}),
    )
    assert replay(started, resumed, gone, fault("bad_checkpoint")).goes_back
    assert not replay(started, gone, fault("bad_checkpoint")).goes_back  # none was left that could be resumed from
    assert not replay(started, gone, resumed).goes_back
    assert not replay(started, resumed, gone, started).goes_back


def test_an_attempt_that_something_outside_ended_is_excused() -> None:
    def excused(*events: tuple[str, dict[str, Any]]) -> list[int]:
        return replay(*events).excused

    assert excused(fault("node_lost"), fault("hang", attempt=2), fault("bad_checkpoint", attempt=3)) == [1]
    assert excused(fault(signal="SIGKILL"), fault(signal="SIGSEGV", attempt=2), fault(attempt=3)) == [1]
    assert excused(("attempt_stopped", {"fault": False, "cause": "preemption"})) == [1]
    assert excused(fault("bad_checkpoint", by_hand="by `scontrol requeue`")) == [1]
    started = ("attempt_started", {"plan": {}})
    assert excused(started) == []
    assert excused(started, ("attempt_started", {"plan": {}, "attempt": 2})) == [1]
    assert excused(started, ("allocation_started", {"job_id": "8"})) == [1]
    assert len(excused(*[fault("node_lost", attempt=number) for number in range(50)])) == 20


def test_who_moves_a_run_by_hand_spends_no_budget() -> None:
    before = fault("unknown", node="n1")
    moved = fault("unknown", node="n1", attempt=2, by_hand="moved by `slurm-resilience requeue`")
    there = replay(before, moved)
    assert (there.count("unknown"), there.unexplained) == (1, 1)
    assert replay(before, fault("unknown", node="n1", attempt=2)).count("unknown") == 2


def test_an_allocation_whose_supervisor_left_no_word() -> None:
    history = History.replay([{"event": "allocation_started", "attempt": 0, "restart": 0, "job_id": "7", "t": 1.0}])
    history.apply({"event": "checkpoint_committed", "attempt": 1, "restart": 0, "step": 5, "t": 9.0})
    assert history.lost == {"job_id": "7", "of_restart": 0, "last_word": 9.0}
    stage = Stage(2, history=history).begin()
    assert stage.last("allocation_lost")["last_word"] == 9.0
    for word in ("requeue_done", "run_failed", "run_completed", "job_ended_for_batch_host"):
        again = History.replay([{"event": "allocation_started", "attempt": 0, "restart": 1, "job_id": "7", "t": 1.0}])
        again.apply({"event": word, "attempt": 1, "restart": 1, "t": 2.0})
        assert again.lost is None
