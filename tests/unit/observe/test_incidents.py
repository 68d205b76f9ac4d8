"""Recovery is data: what the fold makes of a run's events."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.observe.incidents import PHASES, Incident, Incidents
from slurm_resilience.observe.standing import Standing

T0 = 1000.0


def told(
    *lines: tuple[float, str] | tuple[float, str, dict[str, Any]], attempt: int = 1, restart: int = 0
) -> list[dict[str, Any]]:
    """Events at T0 + seconds; ``attempt_started`` and ``allocation_started`` move attempt and restart on."""
    out = []
    for seconds, name, *more in lines:
        attempt += name == "attempt_started"
        restart += name == "allocation_started"
        out.append({"t": T0 + seconds, "event": name, "attempt": attempt, "restart": restart, **(more[0] if more else {})})
    return out


def later(by_s: float, *lines: Any) -> list[Any]:
    """The same lines, ``by_s`` seconds later."""
    return [(seconds + by_s, *rest) for seconds, *rest in lines]


RUNS = [(0.0, "ranks_launched"), (1.0, "first_step", {"step": 1}), (9.0, "step_reported", {"step": 57})]
FAULT = (14.0, "fault_detected", {"cause": "node_lost", "node": "n3", "since": T0 + 10.0, "detail": "silent"})
BACK = [
    (14.2, "attempt_stopped", {"fault": True, "cause": "node_lost", "node": "n3", "detail": "silent"}),
    (14.2, "attempt_started"),
    (14.3, "ranks_launched"),
    (14.6, "resumed", {"step": 40}),
    (14.9, "first_step", {"step": 41}),
]


def test_phases_count_from_the_fault_not_from_its_detection() -> None:
    (found,) = Incidents.of(told(*RUNS, FAULT, *BACK, (17.0, "step_reported", {"step": 57})))
    expected = {
        "fault": 0,
        "detected": 4.0,
        "stopped": 4.2,
        "launched": 4.3,
        "loaded": 4.6,
        "first_step": 4.9,
        "caught_up": 7.0,
    }
    assert found.phases == pytest.approx(expected)
    assert (found.cause, found.node, found.attempt, found.recovered) == ("node_lost", "n3", 1, True)
    assert (found.step, found.resumed_step, found.steps_lost, found.seconds) == (57, 40, 17, pytest.approx(4.9))


def test_the_names_of_phases_come_in_the_order_of_the_loop() -> None:
    (found,) = Incidents.of(told(*RUNS, FAULT, *BACK))
    names = list(found.as_dict()["phases"])
    assert names == [name for name in PHASES if name in names]


def test_the_incident_is_reported_when_its_first_step_comes() -> None:
    fold, ended = Incidents(), []
    for event in told(*RUNS, FAULT, *BACK):
        incident = fold.apply(event)
        if incident is not None:
            ended.append((event["event"], incident.cause))
    assert ended == [("first_step", "node_lost")]


def test_the_cause_that_counts_is_the_one_known_at_the_end() -> None:
    echo = (
        14.0,
        "fault_detected",
        {"cause": "rank_crash", "node": "n1", "rank": 0, "since": T0 + 10.1, "detail": "reset by peer"},
    )
    (found,) = Incidents.of(told(*RUNS, echo, *BACK))
    assert (found.cause, found.node, found.rank) == ("node_lost", "n3", None)


def test_a_preemption_runs_through_the_requeue() -> None:
    events = told(
        *RUNS,
        (20.0, "warning_received", {"signal": "SIGTERM"}),
        (20.1, "warning_explained", {"cause": "preemption", "detail": "PreemptTime is set"}),
        (21.0, "attempt_stopped", {"fault": False, "cause": "preemption", "saved": True}),
        (21.5, "requeue_started"),
        (22.0, "requeue_done"),
        (50.0, "allocation_started", {"nodes": ["n1"]}),
        (55.0, "attempt_started"),
        (56.0, "ranks_launched"),
        (57.0, "resumed", {"step": 57}),
        (58.0, "first_step", {"step": 58}),
    )
    (found,) = Incidents.of(events)
    expected = {
        "fault": 0,
        "detected": 0,
        "stopped": 1,
        "requeued": 2,
        "allocated": 30,
        "launched": 36,
        "loaded": 37,
        "first_step": 38,
        "caught_up": 38,
    }
    assert found.phases == pytest.approx(expected)
    assert (found.cause, found.steps_lost, found.restart) == ("preemption", 0, 0)


def test_a_warning_that_only_wanted_a_checkpoint_is_no_incident() -> None:
    events = told(*RUNS, (20.0, "warning_received", {"signal": "SIGUSR1"}), (30.0, "step_reported", {"step": 90}))
    assert Incidents.of(events) == []


def test_growing_is_no_incident() -> None:
    stopped = (20.0, "attempt_stopped", {"fault": False, "cause": "grow", "saved": True})
    assert Incidents.of(told(*RUNS, (19.0, "decided", {"action": "grow"}), stopped, *BACK[1:])) == []


def test_an_allocation_that_ended_without_a_word_is_an_incident() -> None:
    (found,) = Incidents.of(told(*RUNS, (200.0, "allocation_started", {"nodes": []}), *later(190, *BACK[1:])))
    assert (found.cause, found.recovered) == ("unknown", True)
    assert found.phases["allocated"] == pytest.approx(191.0)  # since the last thing that was heard of it


def test_a_supervisor_that_died_is_an_incident_also_where_everything_was_found_alive() -> None:
    adopted = [(20.0, "supervisor_restarted"), (21.0, "attempt_adopted"), (22.0, "step_reported", {"step": 80})]
    (alive,) = Incidents.of(told(*RUNS, *adopted))
    assert (alive.cause, alive.recovered, alive.went_on, alive.steps_lost) == ("supervisor_lost", True, True, 0)
    assert alive.outcome() == "all ranks had gone on"
    stopped = (24.0, "attempt_stopped", {"fault": False, "cause": "restart"})
    (found,) = Incidents.of(told(*RUNS, (20.0, "supervisor_restarted"), stopped, *later(10, *BACK[1:])))
    assert (found.cause, found.detail) == ("supervisor_lost", "its supervisor ended without a word")
    assert found.steps_lost == found.step - 40, "what it had reached is known, and is done again from the checkpoint"


def test_a_fault_before_the_first_step_is_an_incident_of_its_own() -> None:
    second = (15.0, "fault_detected", {"cause": "rank_crash", "node": "n1", "rank": 0, "since": T0 + 14.9})
    first, again = Incidents.of(told(*RUNS, FAULT, *BACK[:3], second, *later(1, *BACK)))
    assert (first.recovered, first.seconds, first.steps_lost) == (False, None, None)
    assert again.recovered


def test_a_run_that_ends_in_a_fault_did_not_come_back() -> None:
    (found,) = Incidents.of(told(*RUNS, FAULT, BACK[0], (15.0, "run_failed", {"cause": "node_lost"})))
    assert not found.recovered
    assert found.phases == pytest.approx({"fault": 0, "detected": 4.0, "stopped": 4.2})


def test_a_run_that_comes_back_where_nothing_is_left_to_do_is_complete() -> None:
    (found,) = Incidents.of(
        told(*RUNS, FAULT, *BACK[:3], (14.6, "resumed", {"step": 57}), (15.0, "run_completed", {"step": 57}))
    )
    assert (found.recovered, found.seconds, found.steps_lost) == (True, None, 0)
    assert found.outcome() == "back, and complete"


def test_where_it_resumed_may_be_told_late_or_not_at_all() -> None:
    late = [*BACK[:3], (14.9, "first_step", {"step": 41}), (15.0, "resumed", {"step": 40, "verify_s": 0.1})]
    (found,) = Incidents.of(told(*RUNS, FAULT, *late))
    assert (found.resumed_step, found.steps_lost, found.phases["first_step"]) == (40, 17, pytest.approx(4.9))
    (found,) = Incidents.of(told(*RUNS, FAULT, *BACK[:3], BACK[4]))
    assert (found.resumed_step, found.steps_lost) == (None, 17), "the first step says where it went on"


def test_ranks_that_tell_no_steps_are_back_as_far_as_can_be_seen() -> None:
    crash = (10.0, "fault_detected", {"cause": "rank_crash", "node": "n1", "rank": 0})
    started = (12.0, "attempt_started", {"attempt": 2, "nodes": ["n1"], "world": 1})
    outside = (75.0, "watched_from_outside", {"ranks": 1, "quiet_limit_s": 600.0})
    events = told(crash, (11.0, "attempt_stopped", {"fault": True, "cause": "rank_crash"}), started, (13.0, "ranks_launched"))
    assert Incidents.of(events)[0].outcome(open_=True) == "not back yet"
    (found,) = Incidents.of([*events, *told(outside)])
    assert (found.outcome(open_=True), found.recovered) == ("back, as far as can be seen from outside", False)
    standing = Standing.of([*events, *told(outside)])
    assert standing.doing == "training"
    assert "no Run" in standing.because
    late = Incidents.of([*events, *told(outside, (90.0, "first_step", {"step": 1, "attempt": 2}))])[0]
    assert late.outcome() == "back in 1.3 min"


def test_a_run_without_trouble_has_none() -> None:
    assert Incidents.of(told(*RUNS, (20.0, "run_completed", {"step": 60}))) == []


def test_an_incident_is_json() -> None:
    import json

    value = json.loads(json.dumps(Incident("hang", 1.0, 1, 0).as_dict()))
    assert value["seconds"] is None
