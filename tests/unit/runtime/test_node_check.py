"""A check of the nodes between two attempts: what is concluded from its numbers, and that its verdict is heeded."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.node_check import ROUNDS, Said, groups, judge
from slurm_resilience.runtime.states import State
from tests.unit.runtime.stage import Stage
from tests.unit.runtime.test_supervisor import NO_ALARM, Run, runs

__all__ = ["runs"]

NAMES = [f"n{number}" for number in range(1, 7)]


def seen(
    names: list[str],
    *,
    slow: tuple[str, ...] = (),
    mute: tuple[str, ...] = (),
    cut: tuple[str, ...] = (),
    weak: tuple[str, ...] = (),
) -> dict[str, Said]:
    """What nodes say when some are ``slow`` together (their network), ``mute``, ``cut`` off or ``weak`` by themselves."""
    said = {name: Said(0.3 if name in weak else 0.1) for name in names if name not in mute}
    for number in range(ROUNDS):
        for group in groups(len(names), number):
            members = [names[place] for place in group]
            bad = any(name in (*mute, *cut) for name in members)
            seconds = 0.9 if any(name in (*slow, *weak) for name in members) else 0.2
            for name in members:
                if name in said:
                    said[name].rounds[number] = None if bad else seconds
    return said


def test_everybody_works_in_every_round_and_with_two_partners() -> None:
    for count in range(2, 40):
        partners: dict[int, set[int]] = {}
        for number in range(ROUNDS):
            found = groups(count, number)
            assert sorted(itertools.chain(*found)) == list(range(count))
            assert all(len(group) in (2, 3) for group in found)
            for group in found:
                for place in group:
                    others = set(group) - {place}
                    assert count < 4 or count % 2 or not others & partners.get(place, set())
                    partners[place] = partners.get(place, set()) | others


@pytest.mark.parametrize("count", [4, 5, 6])
@pytest.mark.parametrize("how", ["slow", "mute", "cut", "weak"])
def test_the_bad_node_is_told_from_its_partners(how: str, count: int) -> None:
    names = NAMES[:count]
    assert judge(names, seen(names)).suspects == {}
    for bad in names:
        verdict = judge(names, seen(names, **{how: (bad,)}))
        if how in ("slow", "cut") and count == 5:
            assert set(verdict.suspects) <= {bad}  # two groups in each round, and one of three: who it is may not be told
        else:
            assert set(verdict.suspects) == {bad}, verdict
        assert not verdict.inconclusive


@pytest.mark.parametrize("how", ["mute", "weak"])
def test_of_two_and_of_three_a_node_is_told_by_what_it_does_alone(how: str) -> None:
    for count in (2, 3):
        names = NAMES[:count]
        assert set(judge(names, seen(names, **{how: ("n2",)})).suspects) == {"n2"}


def test_nobody_is_named_when_it_may_be_anybody() -> None:
    assert judge(NAMES[:2], seen(NAMES[:2], cut=("n1",))).inconclusive == "no two nodes could work together"
    assert "said nothing in time" in judge(NAMES, seen(NAMES, mute=tuple(NAMES[:4]))).inconclusive
    assert judge(NAMES, {}).inconclusive
    assert judge(NAMES, seen(NAMES, slow=tuple(NAMES))) == judge(NAMES, seen(NAMES))  # all slow: so fast is this kind of node
    noise = {name: Said(0.01 * place, {0: 0.01 * place, 1: 0.01 * place}) for place, name in enumerate(NAMES, 1)}
    assert judge(NAMES, noise).suspects == {}  # milliseconds are what a machine that does something else costs


class Checked:
    """A stage whose agents answer a check; ``bad`` says nothing in it."""

    def __init__(self, *, bad: str = "", **config: Any) -> None:
        self.stage = Stage(4, **{"node_check": "auto", "nodes": (2, 4), **config})
        self.bad = bad

    def answer(self) -> None:
        """What every rank of the check says, once it runs."""
        for agent in list(self.stage.agents.values()):
            launch = agent.launches[-1] if agent.launches else None
            if launch is None or "check" not in launch.plan or not agent.ranks or agent.node == self.bad:
                continue
            for part in ("alone", 0, 1):
                self.stage.fact(agent.node, agent.ranks[0], "node_checked", part=part, seconds=0.1)

    def crash(self, node: str) -> None:
        self.stage.until(State.RUNNING)
        self.stage.kill_rank(node, code=-11, signal="SIGSEGV")

    def checked(self) -> dict[str, Any]:
        self.stage.until(State.CHECKING)
        self.answer()
        self.stage.until(State.RUNNING)
        return self.stage.last("node_check_done")


def test_two_crashes_that_nobody_can_explain_have_the_nodes_checked_and_the_bad_one_is_left_out() -> None:
    checked = Checked(bad="n3")
    checked.stage.running()
    checked.crash("n1")
    checked.stage.until(State.RUNNING)
    assert checked.stage.count("node_check_started") == 0  # one crash is no reason to lose time
    checked.crash("n2")
    done = checked.checked()
    assert done["suspects"] == {"n3": "it said nothing in a check in which the others did"}
    started = checked.stage.last("attempt_started")
    assert started["nodes"] == ["n1", "n2", "n4"]
    assert "n3 is left out: it said nothing in a check" in checked.stage.last("decided")["reason"]
    assert started["attempt"] == done["attempt"] + 1  # the check had a number of its own, so that nothing of it can interfere
    assert checked.stage.count("node_checked") == 0
    # progress and another crash: the verdict stands, and no check is made
    checked.crash("n1")
    checked.stage.until(State.RUNNING)
    assert checked.stage.count("node_check_done") == 1
    assert "n3" not in checked.stage.last("attempt_started")["nodes"]


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_kills_and_exceptions_of_the_code_are_no_reason_for_a_check(mode: str) -> None:
    stage = Stage(4, node_check=mode)
    stage.running()
    for attempt in range(1, 4):
        stage.kill_rank(f"n{attempt}")  # SIGKILL: somebody's doing
        stage.pass_(5.0)
        assert (stage.coordinator.state, stage.coordinator.number) == (State.RUNNING, attempt + 1)
    assert stage.count("node_check_started") == 0


def test_a_check_before_each_attempt_and_none_of_a_single_node() -> None:
    checked = Checked(node_check="always")
    checked.stage.begin()
    assert checked.checked()["suspects"] == {}
    checked.stage.kill_rank("n1")
    assert checked.checked()["suspects"] == {}
    assert checked.stage.count("node_check_done") == 2
    assert len(checked.stage.last("attempt_started")["nodes"]) == 4
    alone = Stage(1, node_check="always")
    alone.running()
    assert alone.count("node_check_started") == 0


def test_a_check_that_does_not_end_is_ended_and_says_nothing() -> None:
    checked = Checked(node_check="always", limits={"check_s": 6.0})
    checked.stage.begin().until(State.CHECKING)
    assert 6.0 <= checked.stage.until(State.RUNNING) < 8.0
    done = checked.stage.last("node_check_done")
    assert "4 of 4 nodes said nothing" in done["inconclusive"]
    assert done["suspects"] == {}
    assert checked.stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3", "n4"]


def test_a_node_that_is_lost_in_a_check_ends_it_and_is_not_judged_by_it() -> None:
    checked = Checked(node_check="always")
    checked.stage.begin().until(State.CHECKING)
    checked.stage.auto_start = False
    checked.stage.kill_agent("n4")
    checked.stage.until(State.RUNNING)
    assert checked.stage.last("node_check_done")["inconclusive"] == "the connection to n4 was lost meanwhile"
    assert checked.stage.last("attempt_started")["nodes"] == ["n1", "n2", "n3"]


def test_a_warning_ends_a_check_and_the_job_is_requeued() -> None:
    from slurm_resilience.errors import Cause

    checked = Checked(node_check="always")
    checked.stage.begin().until(State.CHECKING)
    checked.stage.slurm_says(Cause.PREEMPTION)
    checked.stage.warn()
    checked.stage.until(State.LEAVING)
    assert checked.stage.last("node_check_done")["inconclusive"] == "everything has to end"
    assert checked.stage.live_ranks == {}
    checked.stage.pass_(10.0)
    assert checked.stage.exit_code == ExitCode.REQUEUED


def test_a_verdict_is_dropped_when_the_node_passes_again_is_rebooted_or_forgiven() -> None:
    from slurm_resilience.runtime.history import History

    done = {"event": "node_check_done", "nodes": ["n1", "n2"], "suspects": {"n2": "slow"}}
    for after in (
        {**done, "suspects": {}},
        {"event": "agent_joined", "node": "n2", "boot_id": "c"},
        {"event": "node_forgiven", "node": "n2"},
    ):
        history = History.replay([{"event": "agent_joined", "node": "n2", "boot_id": "b"}, done])
        assert history.suspects == {"n2": "slow"}
        history.apply({**done, "suspects": {}, "inconclusive": "no store"})
        assert history.suspects == {"n2": "slow"}  # what says nothing clears nobody
        history.apply(after)
        assert history.suspects == {}


def test_a_late_word_of_a_check_is_nothing() -> None:
    checked = Checked(node_check="always")
    checked.stage.begin()
    done = checked.checked()
    late = m.Fact(done["attempt"], 0, "node_checked", {"part": "alone", "seconds": 9.0}, 0.0)
    checked.stage.tell(i.Heard(checked.stage.agents["n1"].conn or 0, late))
    assert checked.stage.count("node_checked") == 0
    assert checked.stage.coordinator.state is State.RUNNING


def of_the_check(run: Run, node: str) -> list[int]:
    """Processes of the check on a node, by what they were started with."""
    wanted = (f"RESILIENCE_RUN_DIR={run.folder}\0".encode(), f"RESILIENCE_NODE={node}\0".encode(), b'RESILIENCE_PLAN={"check"')
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if all(words in environment for words in wanted):
            found.append(int(pid))
    return found


def test_nodes_that_are_well_pass_the_check_and_the_run_begins(runs: Callable[..., Run]) -> None:
    run = runs(nodes=2, options=(*NO_ALARM, "--set", "node_check=always", "--set", "limits.check_s=60"))
    run.training(2)
    done = run.last("node_check_done")
    assert "inconclusive" not in done, done
    assert sorted(done["times"]) == ["n1", "n2"]
    assert all(0 < seconds < 60 for times in done["times"].values() for seconds in times), done
    assert "the nodes are checked before the next attempt: node_check is always" in run.output.read_text()
    assert not of_the_check(run, "n1")
    run.process.terminate()
    assert run.end() == ExitCode.CANCELLED


@pytest.mark.long
def test_a_node_whose_processes_stand_still_is_named_and_the_run_goes_on_without_it(runs: Callable[..., Run]) -> None:
    options = ("--nodes", "2-3", "--set", "node_check=always", "--set", "limits.check_s=25")
    run = runs(nodes=3, options=options)
    stopped: set[int] = set()

    def stop() -> bool:
        for pid in of_the_check(run, "n2"):
            if pid not in stopped:
                os.kill(pid, signal.SIGSTOP)
                stopped.add(pid)
        return run.count("node_check_done") > 0

    run.wait("a verdict", stop)
    done = run.last("node_check_done")
    assert stopped
    assert not done.get("inconclusive"), done
    assert list(done["suspects"]) == ["n2"], done
    run.training(done["attempt"] + 1)
    assert run.last("attempt_started")["nodes"] == ["n1", "n3"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in stopped)
    times = done["times"]["n1"]
    assert all(seconds is not None and seconds > 0 for seconds in times[:1]), done
    run.process.terminate()
    assert run.end() == ExitCode.CANCELLED
