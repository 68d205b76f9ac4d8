"""A supervisor that takes the place of another: what it does first, who may become one, and what is left of the other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slurm_resilience.runtime import epochs
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.election import Election
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.runtime.spec import Takeover
from slurm_resilience.runtime.standby import last_word, leave_word
from slurm_resilience.runtime.states import State
from slurm_resilience.slurm.environment import SlurmEnvironment
from tests.unit.runtime.stage import Stage


def past(*, lost: tuple[str, ...] = ()) -> History:
    """What the events of a run on four nodes say, whose first attempt was running when they end."""
    before = Stage().running()
    history = History.replay(before.events)
    for node in lost:
        history.apply({"event": "agent_lost", "node": node})
    return history


def taken(history: History, **more: object) -> Stage:
    stage = Stage(history=history, attempt=1, restarted=True, takeover=Takeover("n1", 5.0), **more)
    stage.auto_start = False
    stage.begin()
    return stage


def test_the_run_goes_on_without_the_batch_host() -> None:
    stage = taken(past())
    assert stage.names_of_events()[0] == "supervisor_took_over"
    for node in ("n2", "n3", "n4"):
        stage.join(node)
    assert stage.until(State.RUNNING) < 2.0
    fault = stage.last("fault_detected")
    assert (fault["cause"], fault["node"]) == ("node_lost", "n1")
    assert fault["since"] == pytest.approx(stage.last("supervisor_took_over")["t"] - 5.0, abs=0.01)
    assert stage.last("attempt_started")["nodes"] == ["n2", "n3", "n4"]
    assert stage.coordinator.number == 2


def test_nodes_that_were_lost_before_are_not_awaited() -> None:
    stage = taken(past(lost=("n3",)))
    stage.join("n2")
    stage.join("n4")
    stage.until(State.RUNNING)
    assert stage.last("attempt_started")["nodes"] == ["n2", "n4"]
    assert stage.count("agent_lost") == 1, "that of n1; the other was no news"


def test_ranks_of_the_dead_host_are_given_the_time_to_end() -> None:
    """It may merely be cut off; its own supervisor stops its ranks a little after we have fallen silent to it."""
    stage = Stage(history=past(), attempt=1, restarted=True, takeover=Takeover("n1", 1.0))
    stage.auto_start = False
    stage.begin()
    for node in ("n2", "n3", "n4"):
        stage.join(node)
    assert stage.until(State.RUNNING) >= 4.0


def test_between_two_attempts_there_is_no_fault_to_be_seen() -> None:
    history = past()
    history.open_attempt = None
    stage = taken(history)
    for node in ("n2", "n3", "n4"):
        stage.join(node)
    stage.until(State.RUNNING)
    assert stage.count("fault_detected") == 0


def test_an_epoch_is_given_once_however_many_ask(tmp_path: Path) -> None:
    got: list[int] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        got.extend(epochs.claim_next(tmp_path, "somebody") for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 161))
    assert epochs.newest(tmp_path) == 160
    assert not epochs.claim(tmp_path, 160, "late")


class Vote:
    """An agent alone with the run folder; time passes when told."""

    def __init__(self, path: Path, *, state: str = "running") -> None:
        self.path, self.now = path, 1000.0
        SupervisorAddress(3, "127.0.0.1", 1, "t", 1, "b", "7", 0, node="n1").write(path)
        RunFolder(path).write_status(RunStatus(state))  # type: ignore[arg-type]
        epochs.claim(path, 3, "n1")
        self.won: list[int] = []
        self.loop = Loop()
        self.alone_since = self.now
        self.news = 0
        self.election = Election(
            self.loop, path, "n2", patience_s=4.5, elected=lambda epoch, _: self.won.append(epoch), news=self._news,
            say=lambda _: None,
        )  # fmt: skip

    def _news(self) -> None:
        self.news += 1

    def pass_(self, seconds: float, *, refused: bool = False, beats: bool = False) -> None:
        for number in range(round(seconds / 0.5)):
            self.now += 0.5
            if beats:
                epochs.beat(self.path, 3, int(self.now) + number)
            self.election.tick(self.now, alone_s=self.now - self.alone_since, refused=refused)
            for _ in range(400):
                if not list(self.loop.helpers()):
                    break
                self.loop.turn(0.05)


def test_who_hears_nothing_and_sees_no_pulse_takes_over_once(tmp_path: Path) -> None:
    vote = Vote(tmp_path)
    vote.pass_(4.0)
    assert vote.won == []
    vote.pass_(3.0)
    assert vote.won == [4]
    assert epochs.newest(tmp_path) == 4
    vote.pass_(3.0)
    assert vote.won == [4], "whoever has claimed it gets the time to announce itself"


def test_a_node_that_was_cut_off_sees_the_pulse_and_stays_what_it_is(tmp_path: Path) -> None:
    vote = Vote(tmp_path)
    vote.pass_(30.0, beats=True)
    assert vote.won == []


def test_a_supervisor_that_only_died_is_started_again_by_its_batch_script(tmp_path: Path) -> None:
    vote = Vote(tmp_path)
    vote.pass_(12.0, refused=True)
    assert vote.won == []
    vote.pass_(6.0, refused=True)
    assert vote.won == [4]


@pytest.mark.parametrize("state", ["complete", "failed", "requeued"])
def test_a_run_that_has_ended_needs_nobody(tmp_path: Path, state: str) -> None:
    vote = Vote(tmp_path, state=state)
    vote.pass_(20.0)
    assert vote.won == []


def test_an_agent_that_was_stopped_itself_counts_anew(tmp_path: Path) -> None:
    vote = Vote(tmp_path)
    vote.pass_(4.0)
    vote.now += 60.0
    vote.election.begin_again()
    vote.alone_since = vote.now
    vote.pass_(3.0)
    assert vote.won == []


def test_a_new_supervisor_is_news(tmp_path: Path) -> None:
    vote = Vote(tmp_path)
    vote.pass_(2.5)
    SupervisorAddress(4, "127.0.0.1", 1, "t", 1, "b", "7", 0, node="n3").write(tmp_path)
    vote.pass_(1.0)
    assert vote.news == 1
    assert vote.won == []


def test_the_last_word_is_for_the_next_run_of_the_same_job_only(tmp_path: Path) -> None:
    leave_word(tmp_path, job_id="7", restart=1, code=66, reason="your code")
    status = RunStatus("failed", "app_error", "your code", 66)

    def here(job: str, restart: int) -> SlurmEnvironment | None:
        return SlurmEnvironment.current({"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart), "SLURM_JOB_NODELIST": "n1"})

    said = last_word(tmp_path, here("7", 1), status)
    assert said is not None
    assert said.code == 66
    assert "your code" in said.sentence
    assert last_word(tmp_path, here("7", 2), status) is None, "somebody has requeued it since"
    assert last_word(tmp_path, here("8", 0), status) is None
    assert json.loads((tmp_path / "last-word.json").read_text())["v"] == 1


STAND_BY = """
import sys
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.standby import stand_by
from slurm_resilience.slurm.environment import SlurmEnvironment

here = SlurmEnvironment.current({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"})
sys.exit(stand_by(RunFolder(sys.argv[1]), here, show=lambda line: print(line, flush=True)))
"""


def test_who_was_superseded_lives_on_through_warnings_and_ends_as_the_run_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(RunStatus("running"))
    with subprocess.Popen([sys.executable, "-c", STAND_BY, str(tmp_path)], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert any("n1 waits for the end of the run" in line for line in waiting.stdout)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            waiting.send_signal(number)
        folder.write_status(RunStatus("failed", "app_error", "your code", 80, 12))
        assert any("the run has ended: failed your code" in line for line in waiting.stdout)
        assert waiting.wait(60) == 80
