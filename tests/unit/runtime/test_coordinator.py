"""Faults and recovery inside one allocation: every transition of the coordinator, on a stage without sockets or processes."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.states import State
from tests.unit.runtime.stage import Stage

LEASE_S = 4.0


# --- the start --------------------------------------------------------------------------------------------------------


def test_an_agent_is_started_on_every_node_and_all_ranks_are_launched() -> None:
    stage = Stage(4, ranks_per_node=2).running()
    assert stage.started == ["n1", "n2", "n3", "n4"]
    assert stage.live_ranks == {"n1": [0, 1], "n2": [2, 3], "n3": [4, 5], "n4": [6, 7]}
    launch = stage.agents["n3"].launches[0]
    assert launch.ranks == [[4, 0], [5, 1]]
    assert (launch.world, launch.group_rank, launch.groups) == (8, 2, 4)
    assert (launch.master_addr, launch.master_port, launch.store_hosted) == ("10.0.0.1", 29500, True)


def test_nobody_may_use_an_attempt_number_before_it_is_durable() -> None:
    stage = Stage(2)
    stage.write_attempts = False
    stage.begin().pass_(5)
    assert stage.written == [1]
    assert stage.live_ranks == {}
    stage.tell(i.AttemptWritten(1))
    assert stage.live_ranks == {"n1": [0], "n2": [1]}


def test_an_attempt_number_that_cannot_be_written_is_a_fault_in_the_end() -> None:
    stage = Stage(2, requeue=False, budgets={"launch_failed": 0})
    stage.write_attempts = False
    stage.begin().pass_(70)
    assert stage.exit_code == ExitCode.LAUNCH_FAILED
    assert "attempt number" in stage.last("run_failed")["reason"]


def test_it_starts_with_those_that_are_warm_when_the_others_do_not_come() -> None:
    stage = Stage(4, limits={"handshake_s": 30.0})
    stage.startable = lambda node: node != "n4"
    stage.begin()
    took = stage.until(State.RUNNING)
    assert took == pytest.approx(30.0, abs=0.3)
    assert sorted(stage.live_ranks) == ["n1", "n2", "n3"]


def test_an_agent_that_imports_for_long_is_waited_for() -> None:
    stage = Stage(2, limits={"handshake_s": 60.0})
    stage.auto_start = False
    stage.begin()
    stage.join("n1")
    slow = stage.join("n2", warm=False)
    stage.pass_(50)
    assert stage.live_ranks == {}
    stage.say(slow, m.Warm(True, "", 50.0))
    assert sorted(stage.live_ranks) == ["n1", "n2"]


def test_a_launcher_that_cannot_fork_starts_its_ranks_cold() -> None:
    stage = Stage(2)
    stage.auto_start = False
    stage.begin()
    stage.join("n1")
    agent = stage.join("n2", warm=False)
    stage.say(agent, m.Warm(False, "numpy started a thread", 1.0))
    assert sorted(stage.live_ranks) == ["n1", "n2"]
    assert stage.last("agent_warm")["reason"] == "numpy started a thread"


def test_too_few_nodes_at_the_start_ask_for_another_allocation() -> None:
    stage = Stage(4, nodes=(3, 4), limits={"handshake_s": 20.0})
    stage.startable = lambda node: node in ("n1", "n2")
    stage.begin().pass_(60)
    assert stage.exit_code == ExitCode.REQUEUED
    assert stage.last("decided")["cause"] == "launch_failed"


def test_too_few_nodes_without_requeue_end_the_run_with_what_the_agents_said() -> None:
    stage = Stage(2, nodes=(2, 2), requeue=False, limits={"handshake_s": 100.0})
    stage.startable = lambda node: node == "n1"
    stage.begin()
    for _ in range(3):
        stage.tell(i.CarrierEnded("n2", 1, "srun: error: cannot reach n2"))
        stage.pass_(12)
    stage.pass_(1)
    assert stage.exit_code == ExitCode.LAUNCH_FAILED
    assert "srun: error: cannot reach n2" in stage.last("run_failed")["reason"]
    assert stage.started.count("n2") == 3


def test_an_agent_that_cannot_see_the_run_folder_ends_the_run_at_once() -> None:
    stage = Stage(2)
    stage.startable = lambda node: node == "n1"
    stage.begin()
    stage.tell(i.CarrierEnded("n2", int(ExitCode.CONFIG_ERROR), "/r is not a run folder; is it shared?"))
    stage.pass_(10)
    assert stage.exit_code == ExitCode.CONFIG_ERROR
    assert "is it shared?" in stage.last("run_failed")["reason"]


def test_agents_of_another_allocation_or_node_are_sent_away() -> None:
    stage = Stage(2).running()
    hello = {"pid": 1, "boot_id": "", "address": "", "warm": True, "cold_reason": "", "attempt": 0, "ranks": []}
    for number, (node, job, restart) in enumerate([("n1", "7", 1), ("n1", "8", 0), ("n9", "7", 0)], start=900):
        stage.tell(i.Joined(number, m.Hello.build("s", node=node, job_id=job, restart=restart, **hello)))
        drop = [out for out in stage.outputs if isinstance(out, i.Drop) and out.conn == number]
        assert len(drop) == 1
        assert drop[0].quit
    assert len(stage.live_ranks) == 2


def test_without_a_store_host_rank_0_makes_the_store() -> None:
    stage = Stage(2)
    stage.auto_start = False
    stage.begin()
    stage.join("n1")
    stage.write_attempts = False
    stage.join("n2")
    # the stage's agents always give a store; a later word of the same agent counts
    stage.say(stage.agents["n1"], m.StoreFailed(1, "no torch"))
    stage.tell(i.AttemptWritten(1))
    launch = stage.agents["n2"].launches[0]
    assert (launch.master_port, launch.store_hosted) == (0, False)


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_dead_rank_stops_all_and_all_are_launched_again() -> None:
    stage = Stage(3).running()
    stage.kill_rank("n2")
    fault = stage.last("fault_detected")
    assert (fault["cause"], fault["node"], fault["rank"], fault["attempt"]) == ("rank_crash", "n2", 1, 1)
    assert stage.live_ranks == {"n1": [0], "n2": [1], "n3": [2]}
    assert {agent.attempt for agent in stage.agents.values()} == {2}
    assert stage.written == [1, 2]


def test_nothing_is_launched_while_a_survivor_has_not_stopped() -> None:
    stage = Stage(3).running()
    stage.agents["n3"].stubborn = True
    stage.kill_rank("n1")
    stage.pass_(20)
    assert stage.coordinator.state is State.STOPPING
    kills = [out for out in stage.outputs if isinstance(out, i.Send) and isinstance(out.message, m.Kill)]
    assert len([kill for kill in kills if kill.conn == stage.agents["n3"].conn]) >= 5
    stage.agents["n3"].stubborn = False
    stage.until(State.RUNNING, 5)


def test_a_node_that_cannot_stop_its_ranks_is_left_out() -> None:
    stage = Stage(3).running()
    stage.agents["n3"].stubborn = True
    stage.startable = lambda node: False  # a new agent would meet the same processes, and refuse
    stage.kill_rank("n1")
    stage.until(State.RUNNING, 60)
    assert "could not stop" in stage.last("agent_lost")["why"]
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2"]


def test_words_of_an_old_attempt_change_nothing() -> None:
    stage = Stage(2).running()
    stage.kill_rank("n1")
    before = list(stage.events)
    agent = stage.agents["n2"]
    stage.say(agent, m.Exit(1, 1, -11, "SIGSEGV", False, stage.clock.wall, [], 3))
    stage.say(agent, m.LaunchFailed(1, "late"))
    stage.say(agent, m.Stopped(1, 0, 0.0, "kill"))
    stage.say(agent, m.StoreFailed(1, "late"))
    assert stage.events == before
    assert stage.coordinator.state is State.RUNNING
    stage.say(agent, m.Fact(1, 1, "checkpoint_committed", {"step": 5}, stage.clock.wall))
    assert stage.last("checkpoint_committed")["attempt"] == 1


def test_the_first_exception_is_named_not_the_echoes() -> None:
    stage = Stage(3).running()
    stage.fact("n1", 0, "exception", type="RuntimeError", message="[gloo] Connection reset by peer", step=4)
    stage.clock.pass_(0.05)
    stage.fact("n3", 2, "exception", type="ValueError", message="bad sample", step=4)
    stage.kill_rank("n1", code=1, signal="")
    fault = stage.last("fault_detected")
    assert (fault["node"], fault["rank"]) == ("n3", 2)
    assert "bad sample" in fault["detail"]


def test_ranks_that_we_kill_are_no_evidence() -> None:
    stage = Stage(3).running()
    stage.fact("n1", 0, "exception", type="RuntimeError", message="[gloo] Connection reset by peer", step=4)
    stage.kill_rank("n1", code=1, signal="")
    assert stage.last("attempt_stopped")["rank"] == 0


def test_a_rank_that_told_its_exception_gets_a_moment_to_print_it() -> None:
    stage = Stage(2).running()
    stage.fact("n1", 0, "exception", type="ValueError", message="x", step=1)
    stage.pass_(0.5)
    assert stage.coordinator.state is State.RUNNING
    stage.pass_(1.0)
    assert stage.count("fault_detected") == 1


def test_the_same_exception_at_the_same_step_twice_ends_the_run() -> None:
    stage = Stage(2).running()
    for _ in range(2):
        stage.everywhere("exception", type="ValueError", message="bad sample at 0x7f00aa", step=0)
        stage.kill_rank("n1", code=1, signal="")
        stage.pass_(3)
    assert stage.exit_code == ExitCode.APP_ERROR
    assert "your code, not the cluster" in stage.last("run_failed")["reason"]
    assert stage.statuses[-1].state == "failed"
    assert stage.requeues == []


def test_the_same_exception_with_progress_in_between_does_not() -> None:
    stage = Stage(2).running()
    for step in (10, 20, 30):
        stage.fact("n1", 0, "checkpoint_committed", step=step, name="c", bytes=1, seconds=0.1)
        stage.fact("n1", 0, "exception", type="ValueError", message="flaky", step=0)
        stage.kill_rank("n1", code=1, signal="")
        stage.until(State.RUNNING)
    assert stage.exit_code is None


def test_a_budget_ends_and_a_checkpoint_refills_it() -> None:
    stage = Stage(2, budgets={"rank_crash": 2}).running()
    for _ in range(2):
        stage.kill_rank("n1")
        stage.until(State.RUNNING)
    stage.fact("n1", 0, "checkpoint_committed", step=10, name="c", bytes=1, seconds=0.1)
    for _ in range(2):
        stage.kill_rank("n2")
        stage.until(State.RUNNING)
    stage.fact("n1", 0, "checkpoint_committed", step=10, name="c", bytes=1, seconds=0.1)  # the same step is no progress
    stage.kill_rank("n2")
    stage.pass_(10)
    assert stage.exit_code == ExitCode.RANK_CRASH
    assert "budget of 2" in stage.last("run_failed")["reason"]


def test_a_rank_that_ends_with_a_code_of_ours_ends_the_run_with_it() -> None:
    stage = Stage(2).running()
    stage.kill_rank("n2", code=int(ExitCode.CONFIG_ERROR), signal="")
    stage.pass_(5)
    assert stage.exit_code == ExitCode.CONFIG_ERROR


def test_all_finished_is_the_end() -> None:
    stage = Stage(3).running()
    stage.finish_ranks()
    stage.pass_(1)
    assert stage.exit_code == ExitCode.OK
    assert stage.statuses[-1].state == "complete"
    assert stage.last("run_completed")["step"] == 10
    assert not any(agent.alive for agent in stage.agents.values())


def test_a_script_without_a_run_is_complete_when_all_ranks_left_with_code_0() -> None:
    stage = Stage(2).running()
    stage.finish_ranks(done=False, fact=None, at=-1)
    stage.pass_(1)
    assert stage.exit_code == ExitCode.OK
    assert stage.count("left_unfinished") == 0


@pytest.mark.parametrize(("done", "fact", "unfinished"), [(False, None, 1), (True, "finished", 0), (False, "stopped", 0)])
def test_a_run_that_all_ranks_leave_in_the_middle_is_complete_but_not_without_a_word(
    done: bool, fact: str | None, unfinished: int
) -> None:
    stage = Stage(2).running()
    stage.finish_ranks(done=done, fact=fact)
    stage.pass_(1)
    assert fact == "stopped" or stage.exit_code == ExitCode.OK
    assert stage.count("left_unfinished") == unfinished
    assert not unfinished or stage.last("left_unfinished")["step"] == 10


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_dies_in_the_teardown_after_its_script_has_ended_is_no_failure(told: bool) -> None:
    stage = Stage(2).running()
    if told:
        stage.fact("n1", 0, "script_ended")
    stage.everywhere("finished", step=10)
    stage.kill_rank("n1", code=-6, signal="SIGABRT", done=True, rank=0)
    stage.finish_ranks(fact=None)
    stage.pass_(1)
    assert stage.count("died_at_exit") == told
    assert stage.count("fault_detected") == (not told)
    assert stage.count("script_ended") == 0
    assert not told or stage.exit_code == ExitCode.OK


def test_one_that_leaves_early_is_reported_and_the_others_are_not_waited_for_for_ever() -> None:
    stage = Stage(2, limits={"init_s": 60.0}).running()
    for agent in stage.agents.values():
        agent.progress = {rank: [-1, 0, 0.1, False, 0.1] for rank in range(2)}
    stage.agents["n1"].ranks.clear()
    stage.say(stage.agents["n1"], m.Exit(1, 0, 0, "", False, stage.clock.wall, [], -1))
    stage.pass_(4)
    assert stage.count("rank_exited_early") == 0
    stage.pass_(46)
    assert stage.last("rank_exited_early")["rank"] == 0
    assert stage.count("rank_exited_early") == 1
    assert stage.coordinator.state is State.RUNNING
    stage.pass_(12)
    assert stage.last("fault_detected")["cause"] == "hang"
    assert "left early" in stage.last("fault_detected")["detail"]


def test_one_that_leaves_early_is_named_when_the_others_break_over_it() -> None:
    stage = Stage(3).running()
    stage.finish_ranks("n2", done=False, fact=None)
    stage.fact("n3", 2, "exception", type="RuntimeError", message="gloo: Connection reset by peer", step=20)
    stage.pass_(1.5)
    fault = stage.last("fault_detected")
    assert (fault["rank"], fault["node"]) == (1, "n2")


def test_ranks_that_stop_by_themselves_are_not_relaunched() -> None:
    stage = Stage(2).running()
    stage.finish_ranks(fact="stopped", why="STOP file")
    stage.pass_(1)
    assert stage.exit_code == ExitCode.CANCELLED
    assert "STOP file" in stage.last("run_failed")["reason"]


@pytest.mark.parametrize(
    ("phase", "age", "hangs"), [(2, 61.0, True), (2, 59.0, False), (3, 61.0, False), (3, 301.0, True), (5, 299.0, False)]
)
def test_a_quiet_rank_is_judged_by_the_limit_of_its_phase(phase: int, age: float, hangs: bool) -> None:
    stage = Stage(2, limits={"step_s": 60.0, "init_s": 300.0}).running()
    stage.agents["n2"].progress = {1: [10, phase, age, False, age]}
    stage.pass_(1)
    assert (stage.count("fault_detected") == 1) == hangs
    if hangs:
        fault = stage.last("fault_detected")
        assert (fault["cause"], fault["rank"]) == ("hang", 1)
        assert stage.clock.wall - fault["since"] == pytest.approx(age, abs=1.5)


def test_a_script_that_never_reports_is_never_called_hanging() -> None:
    stage = Stage(2, limits={"step_s": 5.0, "init_s": 5.0}).running()
    for agent in stage.agents.values():
        agent.progress = {rank: [-1, 0, 1e6, False, 1e6] for rank in range(2)}
    stage.pass_(30)
    assert stage.count("fault_detected") == 0


@pytest.mark.parametrize("kills", [True, False])
def test_ranks_that_are_complete_and_never_end_do_not_hold_the_job_for_ever(kills: bool) -> None:
    stage = Stage(2, limits={"quiet_s": 100.0, "kill_quiet": kills}).running()
    stage.everywhere("finished", step=10)

    def quiet(*seconds: float) -> None:
        for agent, quiet_s in zip(stage.agents.values(), seconds, strict=True):
            agent.progress = {rank: [10, 2, 500.0, True, 500.0, 30, [], 0.0, 0, quiet_s] for rank in range(2)}
        stage.pass_(1)

    quiet(101.0, 0.0)  # one of them still uploads something
    quiet(99.0, 99.0)
    assert (stage.coordinator.state, stage.count("lingered")) == (State.RUNNING, 0)
    quiet(101.0, 105.0)
    stage.pass_(1)
    assert stage.count("fault_detected") == 0
    if not kills:
        assert (stage.coordinator.state, stage.count("lingered")) == (State.RUNNING, 0)
        return
    assert (stage.last("lingered")["ranks"], stage.last("lingered")["quiet_s"]) == (2, 101.0)
    assert stage.count("run_completed") == 1
    assert stage.exit_code == ExitCode.OK


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_silent_node_is_lost_within_its_limit_and_the_others_go_on() -> None:
    stage = Stage(4).running()
    stage.pass_(5)
    stage.power_off("n3")
    stage.pass_(3.3)
    assert stage.count("fault_detected") == 0
    stage.pass_(1.3)
    fault = stage.last("fault_detected")
    assert (fault["cause"], fault["node"]) == ("node_lost", "n3")
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n4"]
    assert stage.coordinator.state is State.RUNNING


def test_a_silent_node_is_not_waited_for_while_it_is_being_tried_again() -> None:
    stage = Stage(3).running()
    stage.startable = lambda node: node != "n3"
    stage.power_off("n3")
    stage.pass_(5)
    assert stage.coordinator.state is State.RUNNING
    stage.pass_(20)
    stage.kill_rank("n1")
    assert stage.coordinator.state is State.RUNNING
    assert stage.started.count("n3") > 1


def test_the_ranks_of_a_lost_agent_are_given_its_lease_before_the_relaunch() -> None:
    stage = Stage(3).running()
    stage.startable = lambda node: node != "n2"
    stage.pass_(1.0)
    stage.kill_agent("n2")
    lost_after = stage.clock.mono
    stage.pass_(1.0)
    assert stage.last("agent_lost")["node"] == "n2"
    assert stage.coordinator.state is State.STOPPING
    while stage.coordinator.state is State.STOPPING:
        stage.pass_(0.1)
    assert stage.clock.mono - lost_after >= LEASE_S - 0.5 - 0.2


def test_a_new_agent_on_the_node_is_the_proof_that_the_old_ranks_are_gone() -> None:
    stage = Stage(3).running()
    stage.kill_agent("n2")
    stage.pass_(1.2)  # the stage starts the new one as soon as it is asked for
    assert stage.coordinator.state is State.RUNNING
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"]


def test_a_connection_that_breaks_and_comes_back_is_no_fault() -> None:
    stage = Stage(3).running()
    agent = stage.agents["n2"]
    assert agent.conn is not None
    stage.tell(i.Parted(agent.conn, "reset"))
    stage.pass_(0.3)
    stage.join("n2")
    stage.pass_(5)
    assert stage.count("fault_detected") == 0
    assert stage.last("agent_joined")["again"] is True
    assert stage.live_ranks == {"n1": [0], "n2": [1], "n3": [2]}


def test_a_connection_that_breaks_before_the_launch_costs_nothing() -> None:
    """The wish for a store may have gone into the old connection, and no agent can miss ranks that it was never given."""
    stage = Stage(2)
    stage.write_attempts = False
    stage.begin().until(State.PREPARING)
    attempt = stage.coordinator.scene.attempt
    assert attempt is not None
    attempt.master_port = None  # the answer went down with the connection, or never was
    for name in ("n1", "n2"):
        stage.join(name)
    stage.pass_(2)
    stage.tell(i.AttemptWritten(1))
    stage.pass_(5)
    assert stage.live_ranks == {"n1": [0], "n2": [1]}
    assert stage.count("fault_detected") == 0


def test_one_that_comes_back_without_its_ranks_is_a_fault() -> None:
    stage = Stage(3).running()
    agent = stage.agents["n2"]
    assert agent.conn is not None
    stage.tell(i.Parted(agent.conn, "reset"))
    agent.ranks.clear()
    stage.join("n2")
    stage.pass_(0.5)
    assert stage.count("fault_detected") == 0  # what happened may still be on its way
    stage.pass_(1.0)
    assert stage.last("fault_detected")["rank"] == 1


def test_what_it_tells_late_names_the_real_end() -> None:
    stage = Stage(3).running()
    agent = stage.agents["n2"]
    assert agent.conn is not None
    stage.tell(i.Parted(agent.conn, "reset"))
    agent.ranks.clear()
    stage.join("n2")
    stage.say(agent, m.Exit(1, 1, -11, "SIGSEGV", False, stage.clock.wall, [], 3))
    assert "SIGSEGV" in stage.last("fault_detected")["detail"]


def test_of_two_agents_on_one_node_the_older_one_is_told_to_end() -> None:
    stage = Stage(2).running()
    old = stage.agents["n1"].conn
    stage.join("n1", pid=999)
    drops = [out for out in stage.outputs if isinstance(out, i.Drop)]
    assert [(drop.conn, drop.quit) for drop in drops] == [(old, True)]
    assert stage.last("fault_detected")["node"] == "n1"
    assert stage.coordinator.state is State.RUNNING


def test_a_node_that_returns_with_old_ranks_has_them_killed() -> None:
    stage = Stage(3).running()
    stage.power_off("n3")
    stage.pass_(5)
    assert stage.coordinator.number == 2
    stage.agents["n3"].mute = False
    stage.join("n3")
    kill = [out for out in stage.outputs if isinstance(out, i.Send) and isinstance(out.message, m.Kill)][-1]
    assert kill.conn == stage.agents["n3"].conn
    assert stage.live_ranks == {"n1": [0], "n2": [1]}


def test_an_agent_that_dies_again_and_again_is_started_ever_less_often() -> None:
    stage = Stage(2, budgets={"node_lost": 1000}).running()
    stage.startable = lambda node: False
    stage.kill_agent("n2")
    for _ in range(200):
        stage.pass_(0.5)
        stage.tell(i.CarrierEnded("n2", 1, "no"))
    assert 3 <= stage.started.count("n2") <= 12
    assert sorted(stage.live_ranks) == ["n1"]


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    stage = Stage(4, nodes=(3, 3)).running()
    assert sorted(stage.live_ranks) == ["n1", "n2", "n3"]
    assert not stage.agents["n4"].launches
    stage.power_off("n2")
    stage.pass_(5)
    started = stage.last("attempt_started")
    assert (started["nodes"], started["world"]) == (["n1", "n3", "n4"], 3)


def test_the_run_grows_again_at_the_next_checkpoint() -> None:
    stage = Stage(3).running()
    stage.power_off("n3")
    stage.pass_(5)
    stage.join("n3", pid=555)
    stage.pass_(1)
    assert stage.coordinator.number == 2
    stage.fact("n1", 0, "checkpoint_committed", step=20, name="c", bytes=1, seconds=0.1)
    assert stage.coordinator.state is State.ENDING
    assert stage.agents["n1"].orders[-1].stop
    stage.everywhere("stopped", step=21, why="grow")  # said by all; nobody waits for the processes to end
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"]
    assert stage.coordinator.history.faults == []
    assert stage.last("attempt_stopped")["saved"] is True


def test_it_does_not_stop_to_take_in_a_node_that_the_mesh_has_no_use_for() -> None:
    """With tp over two nodes, three of four hold no more ranks than two; it relaunched after every checkpoint."""
    stage = Stage(4, nodes=(2, 4), mesh={"tp": "2,out"}).running()
    stage.power_off("n4")
    stage.pass_(5)
    started = stage.last("attempt_started")
    assert (started["nodes"], started["world"]) == (["n1", "n2"], 2)
    for step in (20, 30):
        stage.fact("n1", 0, "checkpoint_committed", step=step, name=f"c{step}", bytes=1, seconds=0.1)
        stage.pass_(1)
        assert (stage.coordinator.state, stage.coordinator.number) == (State.RUNNING, 2)
    stage.join("n4", pid=555)
    stage.pass_(1)
    stage.fact("n1", 0, "checkpoint_committed", step=40, name="c40", bytes=1, seconds=0.1)
    assert stage.coordinator.state is State.ENDING
    assert "n3, n4 can be used again" in stage.last("decided")["reason"]
    stage.everywhere("stopped", step=41, why="grow")
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["world"] == 4


def test_a_node_that_slurm_took_away_is_not_started_again() -> None:
    stage = Stage(3).running()
    stage.power_off("n3")
    stage.pass_(5)
    stage.slurm_says(Cause.UNKNOWN, NodeList="n[1-2]")
    stage.pass_(31)
    assert stage.last("node_gone")["node"] == "n3"
    before = stage.started.count("n3")
    stage.pass_(60)
    assert stage.started.count("n3") == before


def test_too_few_nodes_wait_for_a_lost_one_and_then_ask_for_others() -> None:
    stage = Stage(2, nodes=(2, 2)).running()
    stage.startable = lambda node: node != "n2"
    stage.power_off("n2")
    stage.pass_(6)
    assert stage.last("decided")["action"] == "wait"
    stage.pass_(40)
    assert stage.exit_code == ExitCode.REQUEUED
    assert sorted(stage.requeues[0].lost) == ["n2"]
    assert stage.statuses[-1].state == "requeued"
    assert stage.statuses[-1].cause == "node_lost"


def test_a_node_that_returns_in_time_is_used() -> None:
    stage = Stage(2, nodes=(2, 2)).running()
    stage.startable = lambda node: node != "n2"
    stage.power_off("n2")
    stage.pass_(15)
    stage.join("n2", pid=77)
    assert stage.coordinator.state is State.RUNNING


# --- ourselves --------------------------------------------------------------------------------------------------------


def test_a_supervisor_that_was_frozen_shoots_nobody() -> None:
    stage = Stage(3).running()
    stage.clock.pass_(30.0)
    stage.tell(i.Tick())
    assert stage.last("supervisor_was_frozen")["seconds"] == pytest.approx(30.0, abs=0.2)
    stage.pass_(10)
    assert stage.count("agent_lost") == 0
    assert stage.count("fault_detected") == 0


def test_a_node_that_was_silent_before_is_not_given_all_of_its_time_again() -> None:
    """On a machine that is starved, the supervisor is away again and again; a dead node has to be found all the same."""
    stage = Stage(3).running()
    stage.pass_(1.0)
    stage.power_off("n3")
    silent_s = 0.0
    while not stage.count("agent_lost"):
        assert silent_s < 5.0, "time in which the supervisor looked"
        stage.clock.pass_(1.3)
        stage.tell(i.Tick())
        for name in ("n1", "n2"):
            stage._beat(stage.agents[name])
        stage.pass_(1.8)
        silent_s += 1.8
    assert stage.last("agent_lost")["node"] == "n3"
    assert stage.count("agent_lost") == 1
    assert stage.count("supervisor_was_frozen") >= 2


def test_what_the_agents_did_meanwhile_is_held_against_the_supervisor_alone() -> None:
    stage = Stage(2).running()
    stage.clock.pass_(5.0)
    stage.tell(i.Tick())
    for name in ("n1", "n2"):
        stage.agents[name].ranks.clear()
        stage.say(stage.agents[name], m.Stopped(1, 1, 0.1, "silence"))
    fault = stage.last("fault_detected")
    assert fault["cause"] == "unknown"
    assert "supervisor itself was frozen" in fault["detail"]
    stage.until(State.RUNNING)


def test_a_wall_clock_that_jumps_alarms_nobody() -> None:
    stage = Stage(2).running()
    stage.clock.wall += 3600
    stage.pass_(10)
    stage.clock.wall -= 7200
    stage.pass_(10)
    assert stage.count("fault_detected") == stage.count("agent_lost") == stage.count("supervisor_was_frozen") == 0


def _history_of(stage: Stage) -> History:
    return History.replay(stage.events)


def test_a_restarted_supervisor_adopts_what_runs() -> None:
    first = Stage(2).running()
    stage = Stage(2, history=_history_of(first), attempt=1, restarted=True)
    stage.begin()
    assert stage.coordinator.state is State.ADOPTING
    stage.join("n1", pid=51, ranks=(0,), attempt=1)
    stage.pass_(0.5)
    stage.join("n2", pid=52, ranks=(1,), attempt=1)
    assert stage.coordinator.state is State.RUNNING
    assert stage.count("attempt_adopted") == 1
    assert stage.started == []
    stage.kill_rank("n1")
    assert stage.coordinator.number == 2


def test_it_relaunches_when_a_rank_is_missing() -> None:
    first = Stage(2).running()
    stage = Stage(2, history=_history_of(first), attempt=1, restarted=True).begin()
    stage.join("n1", pid=51, ranks=(0,), attempt=1)
    stage.join("n2", pid=52)
    stage.until(State.RUNNING, 10)
    assert stage.coordinator.number == 2
    assert stage.coordinator.history.faults == []


def test_it_starts_the_agents_that_do_not_call_and_never_before_their_lease_is_over() -> None:
    first = Stage(2).running()
    stage = Stage(2, history=_history_of(first), attempt=1, restarted=True)
    stage.startable = lambda node: False
    stage.begin()
    stage.join("n1", pid=51)
    stage.pass_(3.0)
    assert stage.started == ["n2"]
    assert stage.live_ranks == {}
    stage.join("n2", pid=60)
    stage.until(State.RUNNING, 5)
    assert stage.coordinator.number == 2


def test_a_supervisor_that_keeps_dying_is_itself_the_fault() -> None:
    history = History()
    for _ in range(10):
        history.apply({"event": "supervisor_restarted"})
    stage = Stage(2, history=history, restarted=True).begin()
    stage.pass_(20)
    assert stage.exit_code == ExitCode.INTERNAL


def test_one_that_is_superseded_says_nothing_more() -> None:
    stage = Stage(2).running()
    before = len(stage.events)
    stage.tell(i.Superseded(5))
    assert stage.exit_code == ExitCode.INTERNAL
    stage.pass_(5)
    assert len(stage.events) == before
    assert not any(isinstance(out, i.Send) and isinstance(out.message, m.Quit) for out in stage.outputs)


@pytest.mark.parametrize(
    ("kind", "code"), [("MismatchedCheckpoint", ExitCode.BAD_CHECKPOINT), ("ConfigError", ExitCode.CONFIG_ERROR)]
)
def test_a_checkpoint_of_another_model_is_not_tried_twice(kind: str, code: ExitCode) -> None:
    stage = Stage(2).running()
    stage.everywhere("exception", type=kind, message="of another model", step=-1, exit_code=int(code))
    stage.kill_rank("n1", code=1, signal="")
    stage.pass_(5)
    assert stage.exit_code == code
    assert stage.count("attempt_started") == 1
    assert "again" in stage.last("run_failed")["reason"]
    assert "step -1" not in str(stage.events)


def test_the_state_names_the_step_while_it_runs() -> None:
    stage = Stage(2).running()
    assert stage.statuses[-1].step is None
    stage.fact("n1", 0, "checkpoint_committed", step=10, name="c", bytes=1, seconds=0.1)
    assert (stage.statuses[-1].state, stage.statuses[-1].step) == ("running", 10)
    count = len(stage.statuses)
    for step in range(11, 31):
        stage.fact("n1", 0, "step_reported", step=step)
    assert len(stage.statuses) == count
    stage.pass_(6)
    assert stage.statuses[-1].step == 30


def test_a_run_that_could_not_resume_stands_where_its_last_checkpoint_does() -> None:
    stage = Stage(2, history=History(best_step=40)).begin()
    for agent in stage.agents.values():
        agent.progress = {rank: [0, 1, 0.1, False, 0.1] for rank in range(2)}
    stage.until(State.RUNNING)
    stage.everywhere("exception", type="MismatchedCheckpoint", message="x", step=0, exit_code=int(ExitCode.BAD_CHECKPOINT))
    for rank, agent in enumerate(stage.agents.values()):
        agent.ranks.remove(rank)
    for rank, agent in enumerate(stage.agents.values()):
        stage.say(agent, m.Exit(1, rank, 1, "", False, stage.clock.wall, [], 0))
    stage.pass_(5)
    assert stage.statuses[-1].step == 40
