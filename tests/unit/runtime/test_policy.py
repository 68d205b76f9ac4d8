"""What happens next, and why: the policy as a table of situations."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.config import BudgetConfig, ResilienceConfig
from slurm_resilience.errors import EXIT_CODE_OF, Cause, ExitCode
from slurm_resilience.runtime.history import Fault, History
from slurm_resilience.runtime.policy import RETURN_S, Decision, Situation, budget_of, decide, decide_warned


def config(low: int = 2, high: int = 4, **more: Any) -> ResilienceConfig:
    return ResilienceConfig.build({"nodes": (low, high), **more})


def at_rest(ready: str = "", *, fault: Cause | None = None, coming: str = "", returning: str = "", **more: Any) -> Situation:
    return Situation(
        fault,
        "n1: what was seen",
        tuple(ready.split()),
        tuple(coming.split()),
        tuple(returning.split()),
        **{"idle_s": 100.0, **more},
    )


@pytest.mark.parametrize(
    ("situation", "action", "nodes"),
    [
        (at_rest("n1 n2 n3 n4"), "launch", "n1 n2 n3 n4"),
        (at_rest("n1 n2 n3 n4 n5 n6"), "launch", "n1 n2 n3 n4 n5 n6"),  # the planner takes the best four
        (at_rest("n1 n2 n3", coming="n4"), "wait", ""),
        (at_rest("n1 n2 n3"), "launch", "n1 n2 n3"),
        (at_rest("n1 n2", returning="n3 n4"), "launch", "n1 n2"),
        (at_rest("n1", returning="n2", idle_s=1.0), "wait", ""),
        (at_rest("n1", returning="n2", idle_s=RETURN_S + 1), "requeue", ""),
        (at_rest("n1"), "requeue", ""),
        (at_rest("n1", can_requeue=False), "stop", ""),
        (at_rest("", coming="n1 n2"), "wait", ""),
    ],
)
def test_with_whom(situation: Situation, action: str, nodes: str) -> None:
    decision = decide(History(), situation, config())
    assert (decision.action, decision.nodes) == (action, tuple(nodes.split()))
    assert decision.reason


@pytest.mark.parametrize(
    ("situation", "cause"),
    [
        (at_rest("n1", fault=Cause.NODE_LOST), Cause.NODE_LOST),
        (at_rest("n1", lost=("n2",)), Cause.NODE_LOST),
        (at_rest("n1"), Cause.LAUNCH_FAILED),
    ],
)
def test_too_few_nodes_end_with_what_made_them_few(situation: Situation, cause: Cause) -> None:
    decision = decide(History(), situation, config(requeue=False))
    assert (decision.cause, decision.exit_code) == (cause, EXIT_CODE_OF[cause])


def faults(*causes: Cause, signature: str = "") -> History:
    return History(faults=[Fault(number, str(cause), "n1", signature) for number, cause in enumerate(causes)])


def test_a_short_cut_counts_like_a_long_one() -> None:
    """Agents that heard nothing for some seconds stop their ranks: the network, or the supervisor's host, nobody knows."""
    assert budget_of(Cause.UNKNOWN, BudgetConfig(node_lost=7, rank_crash=1)) == 7


@pytest.mark.parametrize("cause", [Cause.RANK_CRASH, Cause.HANG, Cause.NODE_LOST, Cause.LAUNCH_FAILED, Cause.OOM])
def test_each_cause_has_a_budget_of_its_own(cause: Cause) -> None:
    budget = budget_of(cause, BudgetConfig())
    assert budget
    situation = at_rest("n1 n2 n3 n4", fault=cause)
    assert decide(faults(*[cause] * budget), situation, config()).action == "launch"
    over = decide(faults(*[cause] * (budget + 1)), situation, config())
    assert (over.action, over.cause, over.exit_code) == ("stop", cause, EXIT_CODE_OF[cause])
    other = Cause.HANG if cause is not Cause.HANG else Cause.OOM
    assert decide(faults(*[cause] * 20, other), at_rest("n1 n2 n3 n4", fault=other), config()).action == "launch"


@pytest.mark.parametrize("cause", [Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CANCELLED])
def test_what_slurm_does_costs_nothing(cause: Cause) -> None:
    assert budget_of(cause, BudgetConfig()) is None


def test_a_configuration_error_is_never_tried_again() -> None:
    decision = decide(faults(Cause.CONFIG_ERROR), at_rest("n1 n2 n3 n4", fault=Cause.CONFIG_ERROR), config())
    assert decision.exit_code == ExitCode.CONFIG_ERROR


def test_the_same_exception_twice_is_the_users_code_and_says_so() -> None:
    history = faults(Cause.RANK_CRASH, Cause.RANK_CRASH, signature="ValueError: x at step 3")
    decision = decide(history, at_rest("n1 n2", fault=Cause.RANK_CRASH), config())
    assert decision.exit_code == ExitCode.APP_ERROR
    assert "n1: what was seen" in decision.reason
    history.faults.append(Fault(9, "node_lost", "n2", ""))
    assert decide(history, at_rest("n1 n2", fault=Cause.NODE_LOST), config()).action == "launch"


def test_faults_without_progress_are_followed_by_longer_and_longer_pauses() -> None:
    pauses = []
    for count in range(1, 8):
        history = faults(*[Cause.RANK_CRASH] * count)
        generous = config(budgets={"rank_crash": 1000})
        pauses.append(
            next(
                pause
                for pause in (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
                if decide(history, at_rest("n1 n2 n3 n4", fault=Cause.RANK_CRASH, idle_s=pause), generous).action == "launch"
            )
        )
    assert pauses == [0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0]
    lost = decide(faults(*[Cause.NODE_LOST] * 5), at_rest("n1 n2 n3 n4", fault=Cause.NODE_LOST, idle_s=0.0), config())
    assert lost.action == "launch"


@pytest.mark.parametrize(
    ("cause", "already", "can", "action"),
    [
        (Cause.PREEMPTION, False, True, "requeue"),
        (Cause.TIME_LIMIT, False, True, "requeue"),
        (Cause.NODE_LOST, False, True, "requeue"),
        (Cause.PREEMPTION, False, False, "stop"),
        (Cause.CANCELLED, False, True, "stop"),
        (Cause.UNKNOWN, False, True, "stop"),
        (Cause.OOM, False, True, "stop"),
        (Cause.UNKNOWN, True, True, "requeue"),
        (Cause.PREEMPTION, True, False, "requeue"),
    ],
)
def test_after_a_warning(cause: Cause, already: bool, can: bool, action: str) -> None:
    decision = decide_warned(cause, "as Slurm says", already_requeued=already, can_requeue=can)
    assert (decision.action, decision.exit_code) == (action, EXIT_CODE_OF[cause])
    assert "as Slurm says" in decision.reason


def test_a_time_limit_that_comes_before_there_is_a_checkpoint_is_not_tried_for_ever() -> None:
    def after(*lives: str) -> History:
        history = History()
        for restart, life in enumerate(lives):
            history.apply({"event": "allocation_started", "job_id": "7", "restart": restart})
            if life != "silent":
                history.apply({"event": "resumed" if restart else "started_fresh"})
            if life == "saves":
                history.apply({"event": "checkpoint_committed", "step": restart})
            if restart < len(lives) - 1:
                cause = "preemption" if life == "preempted" else "time_limit"
                history.apply({"event": "decided", "action": "requeue", "cause": cause})
        return history

    def asked(history: History, cause: Cause = Cause.TIME_LIMIT, **more: bool) -> Decision:
        ways = {"already_requeued": False, "can_requeue": True, **more}
        return decide_warned(cause, "1 s left", vain_limits=history.vain_limits, **ways)

    assert asked(after("vain", "vain")).action == "requeue"
    over = asked(after("vain", "vain", "vain"))
    assert (over.action, over.exit_code) == ("stop", ExitCode.TIME_LIMIT)
    assert "3 allocations" in over.reason
    assert "--time" in over.reason
    assert asked(after("saves", "vain", "vain")).action == "requeue"
    assert asked(after("vain", "vain", "saves")).action == "requeue"
    assert asked(after("preempted", "preempted", "preempted")).action == "requeue"
    assert asked(after("silent", "silent", "silent")).action == "requeue", "a script without a Run may save where nobody looks"
    assert asked(after("vain", "vain", "vain"), Cause.PREEMPTION).action == "requeue"
    assert asked(after("vain", "vain", "vain"), already_requeued=True).action == "requeue"


def test_evidence_is_added_to_a_reason_only_where_there_is_some() -> None:
    decision = Decision("stop", "too few")
    assert decision.because("").reason == "too few"
    assert decision.because("n2: no route").reason == "too few (n2: no route)"


def test_a_bad_checkpoint_is_tried_again_only_where_somebody_asked_for_it() -> None:
    situation = at_rest("n1 n2 n3 n4", fault=Cause.BAD_CHECKPOINT)
    over = decide(faults(Cause.BAD_CHECKPOINT), situation, config())
    assert (over.action, over.exit_code) == ("stop", ExitCode.BAD_CHECKPOINT)
    assert decide(faults(Cause.BAD_CHECKPOINT), situation, config(budgets={"bad_checkpoint": 1})).action == "launch"


def test_first_steps_that_condemn_their_checkpoint_are_tried_again_from_an_older_one_and_not_for_ever() -> None:
    situation = at_rest("n1 n2 n3 n4", fault=Cause.BAD_CHECKPOINT, idle_s=60.0)
    for times, action in ((1, "launch"), (2, "launch"), (3, "stop")):
        history = faults(*[Cause.BAD_CHECKPOINT] * times)
        history.goes_back = True
        assert decide(history, situation, config()).action == action
