"""Cases of seeing and explaining that went wrong elsewhere, each by its number in the list of recovery cases, and every cause.

Played against the coordinator where that can be; ``ELSEWHERE`` says which test holds each of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.coordinator import State
from slurm_resilience.runtime.history import History
from tests.unit.runtime.stage import Stage

CASES = 23
ELSEWHERE = {
    1: ["runtime/test_hang.py::test_an_outer_section_over_its_limit_is_a_hang_however_fresh_an_inner_one_is"],
    3: [
        "runtime/test_start.py::test_a_typo_names_the_nearest_key",
        "test_config.py::test_later_sources_win_and_leave_the_rest_alone",
    ],
    5: ["runtime/test_agent.py::test_messages_of_older_attempts_are_refused"],
    6: ["runtime/test_coordinator.py::test_a_spare_takes_the_place_of_a_lost_node"],
    8: [
        "runtime/test_agent.py::test_what_slurm_sends_to_every_process_of_a_step_kills_nobody",
        "runtime/test_warnings.py::test_a_user_signal_without_a_reason_is_a_wish_for_a_checkpoint",
    ],
    12: ["runtime/test_agent.py::test_a_stop_takes_whole_families_and_proves_it"],
    13: [
        "runtime/test_start.py::test_the_address_is_that_of_the_way_to_the_others",
        "runtime/test_coordinator.py::test_without_a_store_host_rank_0_makes_the_store",
    ],
    14: ["runtime/test_history.py::test_replaying_the_file_gives_the_history_that_wrote_it"],
    15: ["runtime/test_policy.py::test_each_cause_has_a_budget_of_its_own"],
    18: ["runtime/test_suspects.py::test_a_node_that_crashes_twice_is_left_out_though_progress_was_made_and_a_spare_comes_in"],
    21: ["runtime/test_supervisor.py::test_all_of_a_job_suspended_and_resumed_is_no_alarm"],
    22: ["runtime/test_launcher.py::test_a_preload_that_starts_a_thread_means_cold_starts_with_the_reason"],
    23: [
        "runtime/test_same_as_python.py::test_a_program_sees_no_difference",
        "runtime/test_same_as_python.py::test_a_source_edited_between_two_attempts_runs_as_edited",
    ],
}


def test_every_case_has_its_test() -> None:
    here = {int(number) for number in re.findall(r"^def test_case_(\d+)_", Path(__file__).read_text(), re.MULTILINE)}
    assert here | ELSEWHERE.keys() == set(range(1, CASES + 1))
    for named in (name for names in ELSEWHERE.values() for name in names):
        file, _, test = named.partition("::")
        assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text(), named


def shows(step: int, sections: list[list[Any]], *, beats: int = 50, quiet_s: float = 0.0) -> list[Any]:
    """One rank in a beat."""
    return [step, 2, sections[-1][2], False, sections[-1][3], beats, sections, 0.05, 50, quiet_s]


def stepping(own_s: float) -> list[Any]:
    return shows(50, [["step", None, own_s, 1000.0, 50]])


def pace(stage: Stage, *ranks: list[Any]) -> None:
    for rank, progress in enumerate(ranks):
        stage.agents[f"n{rank + 1}"].progress = {rank: progress}


def test_case_2_hangs_are_seen_without_a_setting_and_events_say_by_which_limits() -> None:
    stage = Stage(2).running()
    pace(stage, stepping(0.1), stepping(0.1))
    stage.pass_(1)
    assert stage.last("limits_set")["limits"] == {"(start)": 600.0, "step": 300.0}
    stage.say(stage.agents["n1"], m.Seen(1, {"step": [50, 0.11]}))
    stage.pass_(1)
    told = stage.last("limits_set")
    assert (told["limits"]["step"], told["seen"], told["world"]) == (8.0, {"step": 0.11}, 2)
    pace(stage, stepping(7.5), stepping(7.5))
    stage.pass_(1)
    assert stage.count("fault_detected") == 0
    pace(stage, stepping(8.2), stepping(8.3))
    stage.pass_(1)
    fault = stage.last("fault_detected")
    assert (fault["cause"], fault["rank"]) == ("hang", 1)
    assert "limit 8 s; the longest before was 0.11 s" in fault["detail"]


def test_what_was_learned_holds_for_the_next_attempt_and_for_the_next_supervisor() -> None:
    stage = Stage(2).running()
    stage.say(stage.agents["n1"], m.Seen(1, {"step": [50, 2.0]}))
    stage.pass_(1)
    stage.kill_rank("n1")
    stage.until(State.RUNNING)
    stage.pass_(1)
    assert stage.last("limits_set")["limits"]["step"] == 10.0
    history = History.replay(stage.events)
    assert history.silences[2] == {"step": 2.0}
    assert Stage(2, history=history).running().coordinator.scene.attempt.limits.of("step", 50) == 10.0  # type: ignore[union-attr]
    assert Stage(3, history=history).running().coordinator.scene.attempt.limits.of("step", 50) == 300.0  # type: ignore[union-attr]


def test_before_a_hanging_rank_is_killed_it_is_looked_at_and_may_be_found_to_wait_for_another() -> None:
    stage = Stage(2).running()
    for agent in stage.agents.values():
        agent.stubborn = True
    stage.say(stage.agents["n1"], m.Seen(1, {"step": [50, 0.1]}))
    pace(stage, stepping(9.0), stepping(8.5))
    stage.pass_(1)
    assert stage.last("fault_detected")["rank"] == 0
    kills = [output.message for output in stage.outputs if isinstance(getattr(output, "message", None), m.Kill)]
    assert {kill.look for kill in kills[:2]} == {"ranks"}
    collective = (
        'Current thread 0x01 (most recent call first):\n  File "/v/site-packages/torch/distributed/distributed_c10d.py", '
        'line 9 in all_reduce\n  File "/w/train.py", line 4 in main\n'
    )
    loop = 'Current thread 0x01 (most recent call first):\n  File "/w/train.py", line 7 in augment\n'
    for node, rank, stack in (("n1", "0", collective), ("n2", "1", loop)):
        look = {rank: {"state": "S", "cpu": 0.0, "stacks": stack, "asked": True}}
        stage.say(stage.agents[node], m.Looked(1, look, [f"[1.0] {node} says"], 0.4))
    for agent in stage.agents.values():
        agent.stubborn, agent.ranks = False, []
        stage.say(agent, m.Stopped(1, 1, 0.1, "kill"))
    stopped = stage.last("attempt_stopped")
    assert (stopped["cause"], stopped["rank"], stopped["node"]) == ("hang", 1, "n2")
    assert "train.py:7 in augment" in stopped["detail"]
    (written,) = [output for output in stage.outputs if type(output).__name__ == "WriteIncident"]
    assert written.attempt == 1  # type: ignore[union-attr]
    record = written.record  # type: ignore[union-attr]
    assert record["origin"]["rank"] == 1
    assert record["kernel"] == {"n1": ["[1.0] n1 says"], "n2": ["[1.0] n2 says"]}
    assert [each["ranks"] for each in record["doing"]] == [[0], [1]]


def test_case_4_an_agent_that_is_killed_is_noticed() -> None:
    stage = Stage(2).running()
    stage.kill_agent("n2")
    stage.pass_(1)
    assert stage.last("agent_lost")["node"] == "n2"


@pytest.mark.parametrize("code", [ExitCode.CONFIG_ERROR, ExitCode.BAD_CHECKPOINT])
def test_case_7_a_code_of_ours_from_a_rank_is_the_exit_code_of_the_run(code: ExitCode) -> None:
    stage = Stage(2).running()
    stage.kill_rank("n2", code=int(code), signal="")
    stage.pass_(5)
    assert stage.exit_code == code


def test_case_9_a_checkpoint_of_45_s_in_a_grace_of_60_completes() -> None:
    stage = Stage(2).running()
    stage.slurm_says(Cause.PREEMPTION, left_s=60.0)
    stage.warn()
    stage.pass_(45)
    assert sorted(stage.live_ranks) == ["n1", "n2"], "nobody was killed after 30 s"
    stage.everywhere("stopped", step=12, why="preemption")
    stage.finish_ranks(fact=None)
    stage.pass_(1)
    assert stage.last("attempt_stopped")["saved"] is True
    assert stage.exit_code == ExitCode.REQUEUED


def test_case_10_a_dead_peer_without_an_error_anywhere_is_seen_and_all_are_stopped() -> None:
    stage = Stage(3).running()
    pace(stage, stepping(0.2), stepping(0.2))
    stage.power_off("n3")
    stage.pass_(6)
    assert stage.last("fault_detected")["cause"] == "node_lost"
    assert stage.coordinator.number == 2
    assert stage.last("attempt_started")["nodes"] == ["n1", "n2"]


def test_case_11_a_rank_that_leaves_early_is_said_to_and_nobody_waits_for_ever() -> None:
    stage = Stage(2, limits={"init_s": 60.0, "step_s": 30.0}).running()
    pace(stage, stepping(0.1), stepping(0.1))
    stage.agents["n1"].ranks.clear()
    stage.say(stage.agents["n1"], m.Exit(1, 0, 0, "", False, stage.clock.wall, [], 50))
    stage.pass_(7)
    early = stage.last("rank_exited_early")
    assert (early["rank"], early["step"]) == (0, 50)
    pace(stage, stepping(0.1), stepping(31.0))
    stage.pass_(1)
    assert stage.last("fault_detected")["cause"] == "hang"


def test_case_16_progress_that_cannot_be_read_is_neither_progress_nor_its_lack() -> None:
    stage = Stage(2, budgets={"rank_crash": 1}).running()
    stage.kill_rank("n1")
    stage.until(State.RUNNING)
    for unreadable in (None, "12", 1.5):
        stage.fact("n1", 0, "checkpoint_committed", step=unreadable, name="c")
    assert stage.coordinator.history.best_step == -1
    assert stage.coordinator.history.count("rank_crash") == 1, "it neither refills the budget nor empties it"
    stage.fact("n1", 0, "checkpoint_committed", step=5, name="c")
    assert stage.coordinator.history.count("rank_crash") == 0


def test_case_17_the_same_error_at_step_0_on_all_ranks_ends_the_run_at_the_second_time() -> None:
    stage = Stage(2).running()
    for _ in range(2):
        stage.everywhere("exception", type="ValueError", message="no such column", step=0)
        stage.kill_rank("n1", code=1, signal="")
        stage.pass_(3)
    assert stage.exit_code == ExitCode.APP_ERROR
    assert stage.coordinator.number == 2
    assert stage.requeues == []
    assert "your code, not the cluster" in stage.last("run_failed")["reason"]


ECHO = ("Traceback", "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection reset by peer")
ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "os._exit(1)": ({"code": 1, "signal": ""}, "rank_crash", "exited with 1"),
    "SIGSEGV in C": (
        {"code": -11, "signal": "SIGSEGV", "tail": ("Fatal Python error: Segmentation fault", '  File "t.py", line 3 in f')},
        "rank_crash",
        'Segmentation fault; File "t.py", line 3',
    ),
    "MemoryError": ({"code": 1, "signal": "", "tail": ("MemoryError",)}, "oom", "MemoryError"),
    "cgroup OOM": ({"code": -9, "signal": "SIGKILL", "oom": "the kernel says: Killed process 7"}, "oom", "the kernel says"),
    "kill -9": ({"code": -9, "signal": "SIGKILL"}, "rank_crash", "killed by SIGKILL"),
    "a Python exception": ({"raises": ("KeyError", "'x'")}, "rank_crash", "KeyError: 'x'"),
}


@pytest.mark.parametrize("name", ENDS)
def test_case_19_the_first_end_is_named_and_not_its_echoes(name: str) -> None:
    """The others break over it, and are heard first."""
    how, cause, words = ENDS[name]
    stage = Stage(3).running()
    t = stage.clock.wall
    for node, rank in (("n1", 0), ("n3", 2)):
        fields = {"type": "RuntimeError", "message": ECHO[1], "step": 12}
        stage.say(stage.agents[node], m.Fact(1, rank, "exception", fields, t + 0.2))
    if "raises" in how:
        kind, message = how["raises"]
        stage.say(stage.agents["n2"], m.Fact(1, 1, "exception", {"type": kind, "message": message, "step": 12}, t + 0.1))
        how = {"code": 1, "signal": ""}
    end = m.Exit(1, 1, how["code"], how["signal"], False, t + 0.3, list(how.get("tail", ())), 12, how.get("oom", ""))
    stage.agents["n2"].ranks.clear()
    stage.say(stage.agents["n2"], end)
    stage.pass_(2)
    stopped = stage.last("attempt_stopped")
    assert (stopped["cause"], stopped["rank"], stopped["node"]) == (cause, 1, "n2")
    assert words in stopped["detail"]


def test_case_20_a_wall_clock_that_jumps_an_hour_alarms_nobody() -> None:
    stage = Stage(2).running()
    stage.say(stage.agents["n1"], m.Seen(1, {"step": [50, 0.1]}))
    pace(stage, stepping(0.1), stepping(0.1))
    for seconds in (3600, -7200):
        stage.clock.wall += seconds
        stage.pass_(20)
    assert stage.count("fault_detected") == stage.count("agent_lost") == 0


# --- every cause is reached -------------------------------------------------------------------------------------------------


def _raise(kind: str, code: ExitCode | None = None) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        more = {} if code is None else {"exit_code": int(code)}
        stage.everywhere("exception", type=kind, message="m", step=0, **more)
        stage.kill_rank("n1", code=1, signal="")
        stage.pass_(3)

    return play


def _twice(play: Callable[[Stage], None]) -> Callable[[Stage], None]:
    def both(stage: Stage) -> None:
        play(stage)
        play(stage)

    return both


def _warned(cause: Cause) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        stage.slurm_says(cause)
        stage.warn()
        stage.finish_ranks(fact="stopped", why=str(cause))
        stage.pass_(3)

    return play


def _hang(stage: Stage) -> None:
    pace(stage, stepping(301.0), stepping(0.1))
    stage.pass_(1)


def _off(stage: Stage) -> None:
    stage.power_off("n2")
    stage.pass_(6)


REACHED: dict[Cause, Callable[[Stage], None]] = {
    Cause.RANK_CRASH: lambda stage: stage.kill_rank("n2"),
    Cause.HANG: _hang,
    Cause.NODE_LOST: _off,
    Cause.OOM: _raise("MemoryError"),
    Cause.APP_ERROR: _twice(_raise("ValueError")),
    Cause.BAD_CHECKPOINT: _raise("NoValidCheckpoint", ExitCode.BAD_CHECKPOINT),
    Cause.CONFIG_ERROR: _raise("ConfigError", ExitCode.CONFIG_ERROR),
    Cause.PREEMPTION: _warned(Cause.PREEMPTION),
    Cause.TIME_LIMIT: _warned(Cause.TIME_LIMIT),
    Cause.CANCELLED: _warned(Cause.CANCELLED),
}


@pytest.mark.parametrize("cause", REACHED)
def test_every_cause_is_reached_and_explained(cause: Cause, tmp_path: Any) -> None:
    from slurm_resilience.observe.explain import MEANS, stories
    from slurm_resilience.observe.explain_page import page

    stage = Stage(2).running()
    REACHED[cause](stage)
    stage.pass_(3)
    told = {event.get("cause") for event in stage.events if event["event"] in ("attempt_stopped", "run_failed", "decided")}
    assert str(cause) in told
    found = [one for one in stories(stage.events) if str(cause) in (one.cause, *(e.get("cause") for e in one.followed_by))]
    assert found
    text = page(found[-1], number=1, of=1)
    assert MEANS[found[-1].cause] in text
