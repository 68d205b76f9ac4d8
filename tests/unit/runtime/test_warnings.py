"""The end of an allocation: warned, saved, explained by Slurm, then requeued or not; on a stage without Slurm."""

from __future__ import annotations

import dataclasses
import time

import pytest

from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.observe.incidents import Incidents
from slurm_resilience.observe.vocabulary import EVENTS
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.states import State
from tests.unit.runtime.stage import Stage, job_record


def test_the_first_word_of_any_agent_has_all_ranks_stop_in_time() -> None:
    stage = Stage(4).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=13.0)
    stage.warn(node="n3")
    assert stage.coordinator.state is State.ENDING
    for agent in stage.agents.values():
        order = agent.orders[-1]
        assert (order.stop, order.cause) == (True, "preemption")
        assert order.deadline == pytest.approx(stage.clock.wall + 13.0 - 2.0)
    assert stage.last("warning_explained")["cause"] == "preemption"


def test_four_agents_and_the_batch_script_are_one_warning() -> None:
    stage = Stage(4).running()
    stage.slurm_says(Cause.PREEMPTION)
    for name in stage.names:
        stage.warn(node=name)
    stage.tell(i.Signalled("SIGTERM", stage.clock.wall))
    assert stage.count("warning_received") == 1
    assert len(stage.agents["n1"].orders) == 2  # at once, and again with Slurm's own deadline


def test_a_preempted_job_is_requeued_once_every_agent_has_gone() -> None:
    stage = Stage(4).running()
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn()
    assert stage.requeues == []
    stage.finish_ranks(fact="stopped", why="preemption")
    assert not any(agent.alive for agent in stage.agents.values())
    assert stage.last("attempt_stopped")["saved"] is True
    assert stage.exit_code == ExitCode.REQUEUED
    assert (stage.statuses[-1].state, stage.statuses[-1].cause) == ("requeued", "preemption")
    names = stage.names_of_events()
    assert names.index("attempt_stopped") < names.index("requeue_started") < names.index("requeue_done")
    assert stage.coordinator.history.faults == []


def test_the_recipe_waits_for_the_last_agent() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn()
    quits = stage.deaf_to_quit = {"n2"}
    stage.finish_ranks(fact="stopped")
    stage.pass_(3)
    assert stage.coordinator.state is State.LEAVING
    assert stage.requeues == []
    quits.clear()
    stage.kill_agent("n2")
    assert stage.exit_code == ExitCode.REQUEUED


def test_an_agent_that_does_not_go_is_left_behind_in_the_end() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn()
    stage.deaf_to_quit = {"n2"}
    stage.finish_ranks(fact="stopped")
    stage.pass_(7)
    assert stage.last("agents_left_behind")["nodes"] == ["n2"]
    assert stage.exit_code == ExitCode.REQUEUED


@pytest.mark.parametrize(
    ("cause", "code", "state"),
    [(Cause.CANCELLED, ExitCode.CANCELLED, "cancelled"), (Cause.OOM, ExitCode.OOM, "failed")],
)
def test_what_is_not_slurms_to_end_is_never_requeued(cause: Cause, code: ExitCode, state: str) -> None:
    stage = Stage(2).running()
    stage.slurm_says(cause, JobState="COMPLETING")
    stage.warn()
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.requeues == []
    assert stage.exit_code == code
    assert stage.statuses[-1].state == state


def test_without_slurms_answer_nothing_is_requeued() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.UNKNOWN, known=False)
    stage.warn()
    stage.finish_ranks(fact="stopped")
    stage.pass_(5)
    assert stage.exit_code is None  # asked again and again
    stage.pass_(15)
    assert stage.requeues == []
    assert stage.exit_code == ExitCode.INTERNAL


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGUSR2"])
def test_without_scontrol_the_batch_script_puts_the_job_back(signal: str) -> None:
    """submitit#1601, Lightning#21404, pyxis#129: there is none on the node, or in the container."""
    stage = Stage(2, spec={"script_requeues": True, "lead_s": 90.0}).running()
    stage.slurm_says(Cause.UNKNOWN, known=False)
    stage.warn(signal)
    assert stage.agents["n1"].orders[-1].stop
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert len(stage.requeues) == 1
    assert "unless it was cancelled" in stage.last("decided")["reason"]
    assert stage.exit_code == ExitCode.REQUEUED


def test_an_answer_that_never_comes_does_not_stop_the_ranks_from_saving() -> None:
    stage = Stage(2).running()
    stage.slurm_answers = False
    stage.warn()
    assert stage.agents["n1"].orders[-1].stop
    assert stage.agents["n1"].orders[-1].deadline == pytest.approx(stage.clock.wall + 26.0)  # KillWait 30, less the margin


def test_the_cause_that_counts_is_asked_for_after_everything_has_stopped() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn()
    stage.slurm_says(Cause.CANCELLED, JobState="COMPLETING")  # somebody cancels the job while it saves
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.requeues == []
    assert stage.exit_code == ExitCode.CANCELLED


def test_an_answer_from_before_the_end_is_not_acted_on() -> None:
    stage = Stage(2).running()
    stage.slurm_answers = False
    stage.warn()
    stage.finish_ranks(fact="stopped")
    assert stage.coordinator.state is State.ASKING
    stage.clock.pass_(0.1)
    stage.slurm_says(Cause.PREEMPTION)
    stage.slurm_answers = True
    stale = stage.verdict()
    stage.slurm_says(Cause.CANCELLED, JobState="COMPLETING")
    stage.tell(i.SlurmSaid(stale))
    assert stage.requeues == []
    assert stage.exit_code == ExitCode.CANCELLED


def test_a_job_that_slurm_has_requeued_already_goes_on_there() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn()
    stage.slurm_says(Cause.UNKNOWN, requeued=True, JobState="COMPLETING", Restarts="1")
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.exit_code == ExitCode.REQUEUED
    assert stage.statuses[-1].cause == "preemption"  # named before the requeue wiped it


HAND = "moved by `slurm-resilience requeue`"


def moved_by_hand(stage: Stage, *, by_hand: str = HAND) -> None:
    stage.slurm_says(Cause.UNKNOWN, requeued=True, JobState="COMPLETING", Restarts="1")
    said = stage.verdict
    stage.verdict = lambda: dataclasses.replace(said(), by_hand=by_hand, detail=f"{by_hand}; as Slurm says")


def test_who_moved_the_job_by_hand_is_in_its_events_and_no_cause() -> None:
    stage = Stage(2).running()
    moved_by_hand(stage)
    stage.warn("SIGUSR1")  # a mere wish for a checkpoint, were it not for Slurm's word
    assert stage.agents["n1"].orders[-1].stop
    stage.slurm_says(Cause.UNKNOWN, requeued=True, JobState="COMPLETING", Restarts="1")  # accounting does not answer again
    stage.pass_(35)
    assert stage.count("warning_explained") == 1
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.exit_code == ExitCode.REQUEUED
    for name in ("warning_explained", "attempt_stopped", "decided"):
        assert (stage.last(name)["cause"], stage.last(name)["by_hand"]) == ("unknown", HAND), name
    assert stage.last("decided")["reason"].startswith(f"requeued ({HAND}; as Slurm says)")
    assert stage.coordinator.history.faults == []
    assert stage.coordinator.history.excused == [1]


def test_accounting_that_lags_is_asked_until_it_tells_who_moved_the_job() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.UNKNOWN, requeued=True, JobState="COMPLETING", Restarts="1")
    stage.warn()
    moved_by_hand(stage)
    said, asked = stage.verdict, []
    stage.verdict = lambda: asked.append(1) or said()  # type: ignore[func-returns-value]
    stage.pass_(10)
    assert len(asked) == 1, "it has been told"
    assert [event.get("by_hand") for event in stage.events if event["event"] == "warning_explained"] == [None, HAND]
    assert [one.cause for one in Incidents.of(stage.events)] == []
    stage.finish_ranks(fact="stopped")
    assert [one.cause for one in Incidents.of(stage.events)] == ["requeued"]


@pytest.mark.parametrize(("cancelled", "code"), [(True, ExitCode.CANCELLED), (False, ExitCode.INTERNAL)])
def test_a_job_that_was_moved_by_hand_and_does_not_come_back(cancelled: bool, code: ExitCode) -> None:
    stage = Stage(2).running()
    stage.requeue_ok = False
    moved_by_hand(stage)
    stage.warn()
    if cancelled:
        stage.slurm_says(Cause.CANCELLED, JobState="COMPLETING", Restarts="1")
    stage.finish_ranks(fact="stopped")
    stage.pass_(31)
    assert stage.exit_code == code
    assert stage.last("run_failed").get("by_hand") == (None if cancelled else HAND)


def test_what_could_not_be_saved_in_time_is_killed_in_time() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=10.0)
    stage.warn()
    stage.pass_(7.5)
    assert stage.live_ranks
    stage.pass_(1.0)
    assert not stage.live_ranks
    assert (stage.last("stop_deadline_passed")["ended"], stage.last("stop_deadline_passed")["saved"]) == (0, 0)
    assert stage.last("attempt_stopped")["saved"] is False
    assert stage.exit_code == ExitCode.REQUEUED


def test_what_was_saved_counts_though_its_process_did_not_end_in_time() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=10.0)
    stage.warn()
    stage.everywhere("stopped", step=12, why="preemption")
    stage.pass_(7)
    assert stage.coordinator.state is State.ENDING  # the user's code after the loop may still run
    stage.pass_(2)
    assert stage.last("attempt_stopped")["saved"] is True
    assert stage.exit_code == ExitCode.REQUEUED


def test_stop_grace_bounds_how_long_ranks_may_save() -> None:
    stage = Stage(2, limits={"stop_grace_s": 20.0}).running()
    stage.slurm_says(Cause.TIME_LIMIT, left_s=600.0)
    stage.warn("SIGUSR2")
    assert stage.agents["n1"].orders[-1].deadline == pytest.approx(stage.clock.wall + 20.0)


def test_a_loop_that_does_not_ask_is_told_of() -> None:
    """spd#740: a flag that is polled only between steps, while an evaluation runs."""
    stage = Stage(2).running()
    stage.pass_(2)
    stage.slurm_says(Cause.PREEMPTION, left_s=60.0)
    stage.warn()
    stage.pass_(7)
    assert stage.count("stop_not_heard") == 0
    stage.pass_(20)
    assert stage.count("stop_not_heard") == 1
    assert stage.last("stop_not_heard")["waited_s"] == pytest.approx(8.0, abs=0.3)
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.exit_code == ExitCode.REQUEUED


def test_ranks_that_save_are_not_told_of() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=60.0)
    stage.warn()
    stage.everywhere("stopped", step=10)
    stage.pass_(20)
    assert stage.count("stop_not_heard") == 0


def test_a_second_term_means_now() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=40.0)
    stage.warn()
    stage.pass_(10)
    stage.warn()
    assert stage.agents["n1"].orders[-1].deadline == pytest.approx(stage.clock.wall + 5.0)
    stage.pass_(6)
    assert not stage.live_ranks


def test_a_rank_that_dies_while_saving_leaves_the_others_a_last_moment() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=60.0)
    stage.warn()
    stage.kill_rank("n1", code=1, signal="")
    stage.pass_(4.0)
    assert stage.live_ranks == {"n2": [1]}
    stage.pass_(1.5)
    assert stage.exit_code == ExitCode.REQUEUED
    assert stage.last("attempt_stopped")["saved"] is False
    assert stage.count("fault_detected") == 0


def test_a_node_that_dies_while_saving_does_not_hold_the_requeue_up() -> None:
    stage = Stage(3).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=60.0)
    stage.startable = lambda node: False
    stage.warn()
    stage.power_off("n3")
    stage.pass_(15)
    assert stage.exit_code == ExitCode.REQUEUED
    assert sorted(stage.requeues[0].lost) == ["n3"]
    assert stage.clock.wall - stage.requeues[0].lost["n3"] == pytest.approx(15, abs=1)


def test_a_fault_before_the_warning_is_not_followed_by_a_launch() -> None:
    stage = Stage(2).running()
    stage.agents["n2"].stubborn = True
    stage.kill_rank("n1")
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn(node="n1")
    stage.agents["n2"].stubborn = False
    stage.pass_(5)
    assert stage.coordinator.number == 1
    assert stage.exit_code == ExitCode.REQUEUED


def test_a_warning_before_the_first_launch_ends_it_too() -> None:
    stage = Stage(2, limits={"handshake_s": 100.0})
    stage.startable = lambda node: node == "n1"
    stage.begin()
    stage.slurm_says(Cause.CANCELLED, JobState="COMPLETING")
    stage.tell(i.Signalled("SIGTERM", stage.clock.wall))
    stage.pass_(8)
    assert stage.exit_code == ExitCode.CANCELLED


def test_a_run_that_finishes_while_it_is_warned_is_complete() -> None:
    stage = Stage(2).running()
    stage.finish_ranks("n1")
    stage.agents["n2"].stubborn = True
    stage.finish_ranks("n2")
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn(node="n2")
    stage.agents["n2"].stubborn = False
    stage.pass_(4)
    assert stage.exit_code == ExitCode.OK


def test_a_user_signal_near_the_end_is_the_time_limit() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.TIME_LIMIT, left_s=100.0)
    stage.warn("SIGUSR2")
    assert stage.agents["n1"].orders[-1].stop
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert (stage.exit_code, stage.statuses[-1].cause) == (ExitCode.REQUEUED, "time_limit")


def test_a_user_signal_without_a_reason_is_a_wish_for_a_checkpoint() -> None:
    stage = Stage(2).running()
    stage.warn("SIGUSR1")
    stage.pass_(2)
    assert stage.agents["n1"].orders == []
    stage.pass_(4)
    order = stage.agents["n1"].orders[-1]
    assert (order.stop, order.save) == (False, 1)
    stage.pass_(30)
    assert stage.coordinator.state is State.RUNNING
    stage.warn("SIGUSR1")
    stage.pass_(6)
    assert stage.agents["n1"].orders[-1].save == 2


def test_term_after_a_user_signal_is_obeyed_at_once() -> None:
    stage = Stage(2).running()
    stage.warn("SIGUSR2")
    stage.pass_(0.5)
    assert stage.agents["n1"].orders == []
    stage.warn("SIGTERM")
    assert stage.agents["n1"].orders[-1].stop


def test_term_from_somebody_while_slurm_has_no_reason_is_a_wish_to_end() -> None:
    stage = Stage(2).running()
    stage.warn("SIGTERM")
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.exit_code is None
    stage.pass_(5)
    assert stage.requeues == []
    assert stage.exit_code == ExitCode.CANCELLED


@pytest.mark.parametrize("how", ["no answer", "a late one"])
def test_a_controller_that_was_away_may_have_forgotten_why_it_sent_it(how: str) -> None:
    """Killed right after it had preempted the job, it comes back without a PreemptTime, and preempts the job again.

    scontrol itself waits for it: then the first that we hear, seconds later, is that there is no reason.
    """
    stage = Stage(2).running()
    stage.slurm_says(Cause.UNKNOWN, known=how != "no answer", waited_s=0.0 if how == "no answer" else 4.0)
    stage.warn("SIGTERM")
    stage.finish_ranks(fact="stopped")
    stage.pass_(6)
    stage.slurm_says(Cause.UNKNOWN)
    stage.pass_(6)
    assert stage.exit_code is None, "it is not taken for a wish to end"
    stage.slurm_says(Cause.PREEMPTION)
    stage.pass_(2)
    assert stage.exit_code == ExitCode.REQUEUED


def test_an_end_that_nobody_signalled_is_seen_by_looking() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.CANCELLED, JobState="COMPLETING")
    stage.pass_(31)
    assert stage.last("warning_received")["signal"] == "none"
    assert stage.agents["n1"].orders[-1].stop


def test_a_time_limit_that_nobody_signalled_is_met_in_time() -> None:
    """accelerate#3400: a warning for the batch shell alone (--signal=B:…) reaches no agent, and no signal is waited for."""
    stage = Stage(2, spec={"lead_s": 90.0}).running()
    ends_at = stage.clock.wall + 200.0
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ends_at))
    stage.verdict = lambda: stage._verdict(Cause.TIME_LIMIT, left_s=ends_at - stage.clock.wall, EndTime=end)
    stage.pass_(100)
    assert stage.agents["n1"].orders == [], "there is time left"
    stage.pass_(20)
    assert stage.last("warning_received")["signal"] == "none"
    assert stage.agents["n1"].orders[-1].stop
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert (stage.exit_code, stage.statuses[-1].cause) == (ExitCode.REQUEUED, "time_limit")


@pytest.mark.parametrize("policy", ["checkpoint_and_move", "warn"])
def test_a_maintenance_is_left_in_time(policy: str) -> None:
    stage = Stage(2, on_drain=policy).running()
    begins_at = stage.maintenance_at = stage.clock.wall + 300.0
    stage.verdict = lambda: stage._verdict(
        Cause.NODE_DRAINED if begins_at - stage.clock.wall < 180 else Cause.UNKNOWN, left_s=begins_at - stage.clock.wall
    )
    stage.pass_(170)
    assert stage.agents["n1"].orders == [], "there is time left"
    stage.pass_(20)
    if policy == "warn":
        assert stage.agents["n1"].orders == []
        return
    assert stage.agents["n1"].orders[-1].stop
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert (stage.exit_code, stage.statuses[-1].cause) == (ExitCode.REQUEUED, "node_drained")


def test_requeue_that_fails_is_a_failure_with_its_reason() -> None:
    stage = Stage(2).running()
    stage.requeue_ok = False
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn()
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.exit_code == ExitCode.PREEMPTED
    assert "as told" in stage.last("run_failed")["reason"]
    assert stage.count("requeue_failed") == 1


def test_requeue_switched_off_ends_with_the_causes_code() -> None:
    stage = Stage(2, requeue=False).running()
    stage.slurm_says(Cause.TIME_LIMIT)
    stage.warn()
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.requeues == []
    assert stage.exit_code == ExitCode.TIME_LIMIT


@pytest.mark.parametrize(
    ("signal", "code"), [("SIGTERM", ExitCode.CANCELLED), ("SIGINT", ExitCode.CANCELLED), ("SIGUSR2", ExitCode.PREEMPTED)]
)
def test_without_slurm_the_signal_itself_says_what_is_meant(signal: str, code: ExitCode) -> None:
    stage = Stage(2, has_slurm=False).running()
    stage.tell(i.Signalled(signal, stage.clock.wall))
    assert stage.coordinator.state is State.ENDING
    stage.finish_ranks(fact="stopped")
    stage.pass_(1)
    assert stage.exit_code == code


def test_an_agent_that_calls_while_the_run_ends_is_sent_home() -> None:
    stage = Stage(2).running()
    stage.deaf_to_quit = {"n2"}
    stage.finish_ranks()
    assert stage.coordinator.state is State.LEAVING
    stage.tell(i.Parted(stage.agents["n2"].conn or 0, "x"))
    stage.deaf_to_quit = set()
    stage.join("n2")
    assert isinstance([out for out in stage.outputs if isinstance(out, i.Send)][-1].message, m.Quit)


def test_growing_gives_way_to_a_warning() -> None:
    stage = Stage(2).running()
    stage.power_off("n2")
    stage.pass_(5)
    stage.join("n2", pid=9)
    stage.fact("n1", 0, "checkpoint_committed", step=20, name="c", bytes=1, seconds=0.1)
    stage.slurm_says(Cause.PREEMPTION)
    stage.warn(node="n1")
    stage.finish_ranks("n1", fact="stopped")
    stage.pass_(1)
    assert stage.exit_code == ExitCode.REQUEUED


def test_every_event_is_in_the_vocabulary() -> None:
    import re
    from pathlib import Path

    import slurm_resilience.runtime as runtime

    source = "\n".join(path.read_text() for path in Path(runtime.__file__).parent.glob("*.py"))
    used = set(re.findall(r'(?:_record|_note|record)\(\s*"([a-z_]+)"', source)) | set(
        re.findall(r'\(\("([a-z_]+)", \{', source)
    )
    assert used - EVENTS.keys() == set()
    assert {"attempt_started", "ranks_launched", "warning_explained"} <= used


def test_a_job_with_a_dead_node_is_running_though_slurm_calls_it_signaling() -> None:
    """Slurm never gets an answer from the dead node, so the word stays for the whole grace period."""
    from slurm_resilience.slurm.cause import judge

    times = {"PreemptTime": "2027-01-15T08:00:00", "EndTime": "2027-01-15T08:00:30"}
    assert judge(job_record(JobState="SIGNALING", **times), 0, now=1_800_000_000.0).cause is Cause.PREEMPTION
    stage = Stage(2).running()
    stage.slurm_says(Cause.UNKNOWN, JobState="SIGNALING")
    stage.warn("SIGUSR2")
    stage.pass_(5)
    assert not stage.agents["n1"].orders[-1].stop
