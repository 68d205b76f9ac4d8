"""The real thing on this machine: `slurm-resilience run --local`, agents, launchers and ranks, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.incidents import Incidents
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.messages import Hello
from slurm_resilience.runtime.processes import Process, descendants
from slurm_resilience.runtime.run_folder import RunFolder

PATIENCE_S = 90.0
# Silence is no alarm where a test is not about it: on a busy machine any of these processes may be held up for seconds.
NO_ALARM = ("--set", "limits.agent_silence_s=100", "--set", "limits.node_silence_s=200")

# Steps without torch: a counter in a file is the checkpoint.  It obeys the order to stop.
SCRIPT = """
    import os, signal, sys, time
    from slurm_resilience.progress.contract import RankContract
    from slurm_resilience.progress.facts import FactSender
    from slurm_resilience.progress.page import PageWriter, Phase

    for each in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    total = int(sys.argv[1])
    contract = RankContract.from_environment()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    page = PageWriter(contract.page)
    facts = FactSender(contract.facts, attempt=contract.attempt, rank=rank)
    saved = os.path.join(contract.run_dir, "saved")
    step = int(open(saved).read()) if os.path.exists(saved) else 0
    facts.send("resumed", step=step, checkpoint=f"at-{step}", seconds=0.0, world=world) if step else facts.send("started_fresh")

    def save():
        if rank == 0:
            with open(saved + ".new", "w") as file:
                file.write(str(step))
            os.rename(saved + ".new", saved)
            facts.send("checkpoint_committed", step=step, name=f"at-{step}", bytes=1, seconds=0.0)

    page.enter(Phase.STEP)
    first = True
    while step < total:
        time.sleep(0.02)
        step += 1
        page.beat(step)
        if first:
            facts.send("first_step", step=step, loss=1.0)
            first = False
        if page.orders().stop:
            save()
            facts.send("stopped", step=step, why=page.orders().cause)
            page.done()
            sys.exit(0)
        if step % 10 == 0:
            save()
    facts.send("finished", step=step)
    page.done()
"""


class Run:
    """A supervisor of our own, in a process of its own; whatever it started is gone when the test ends."""

    def __init__(self, folder: Path, *, nodes: int = 2, steps: int = 100_000, options: tuple[str, ...] = NO_ALARM) -> None:
        self.folder = folder / "run"
        script = folder / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        self.output = folder / "out"
        self.command = [
            sys.executable, "-m", "slurm_resilience", "run", "--run-dir", str(self.folder), "--local", str(nodes), "--cold",
            *options, "--", sys.executable, str(script), str(steps),
        ]  # fmt: skip
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, start_new_session=True)
        return self.process

    @property
    def events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "events.jsonl").read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def last(self, name: str) -> dict[str, Any]:
        return [event for event in self.events if event["event"] == name][-1]

    def count(self, name: str) -> int:
        return sum(event["event"] == name for event in self.events)

    def wait(self, what: str, true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}\n{self.output.read_text()}"
            time.sleep(0.02)

    def training(self, attempt: int) -> None:
        """Wait until this attempt has saved something."""

        def saved() -> bool:
            return any(event["event"] == "checkpoint_committed" and event["attempt"] == attempt for event in self.events)

        self.wait(f"a checkpoint of attempt {attempt}", saved)

    def rank(self, number: int) -> int:
        """The process of a rank."""
        pids = {int(rank): pid for node in self.last("ranks_launched")["pids"].values() for rank, pid in node.items()}
        return int(pids[number])

    def agent(self, node: str) -> int:
        return int([event for event in self.events if event["event"] == "agent_joined" and event["node"] == node][-1]["pid"])

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for node in {event["node"] for event in self.events if event["event"] == "agent_joined"}:
            try:
                if str(self.folder) in Path(f"/proc/{self.agent(node)}/cmdline").read_text():
                    os.kill(self.agent(node), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**more: Any) -> Run:
        made.append(Run(tmp_path, **more))
        return made[-1]

    yield make
    for run in made:
        run.clean()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_run_from_start_to_end_and_again(runs: Callable[..., Run]) -> None:
    run = runs(steps=30)
    assert run.end() == ExitCode.OK
    assert RunFolder(run.folder).status().state == "complete"  # type: ignore[union-attr]
    assert run.last("run_completed")["step"] == 30
    assert [event["seq"] for event in run.events] == list(range(1, len(run.events) + 1))
    assert (run.folder / "supervisor.json").stat().st_mode & 0o777 == 0o600
    assert "=== attempt 1 on n2 ===" in (run.folder / "logs/attempt-0001/rank-00001.log").read_text()
    told = run.output.read_text()
    assert "attempt 1: 2 nodes (n1 n2), 2 ranks" in told
    assert "run complete at step 30" in told
    before = len(run.events)
    run.start()
    assert run.end() == ExitCode.OK
    said = run.output.read_text()
    assert "this run is complete" in said
    assert len(run.events) == before
    # what it says one can do is so
    state = run.folder / "state.json"
    assert f"remove {state}" in said
    state.unlink()
    run.command[-1] = "40"
    run.start()
    assert run.end() == ExitCode.OK
    assert run.last("run_completed")["step"] == 40
    assert run.last("resumed")["step"] == 30


@pytest.mark.parametrize("seconds", [8.0, pytest.param(90.0, marks=pytest.mark.long)])
def test_all_of_a_job_suspended_and_resumed_is_no_alarm(seconds: float, runs: Callable[..., Run]) -> None:
    """As `scontrol suspend` and `resume` do it: every process stops, supervisor and guardians too, longer than any limit."""
    run = runs(nodes=2, options=("--set", "limits.agent_silence_s=5", "--set", "limits.node_silence_s=7"))
    run.training(1)
    everybody = [process for process in descendants(run.process.pid) if process.state not in ("Z", "X")]
    everybody.append(Process(run.process.pid, 0, "", 0))
    assert len(everybody) >= 7, "supervisor, two guardians, agents and ranks"
    ranks = [run.rank(number) for number in range(2)]
    for process in everybody:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    for process in everybody:
        os.kill(process.pid, signal.SIGCONT)
    saved = run.count("checkpoint_committed")
    run.wait("training after it", lambda: run.count("checkpoint_committed") > saved + 3)
    assert all(alive(rank) for rank in ranks)
    assert run.last("supervisor_was_frozen")["seconds"] > seconds / 2
    assert run.count("fault_detected") == run.count("agent_lost") == 0
    assert run.count("attempt_started") == 1


def test_a_rank_an_agent_and_the_supervisor_are_killed_and_the_run_goes_on(runs: Callable[..., Run]) -> None:
    run = runs(nodes=3)
    run.training(1)
    first_ranks = [run.rank(number) for number in range(3)]
    os.kill(run.rank(1), signal.SIGKILL)
    run.training(2)
    assert not any(alive(pid) for pid in first_ranks)
    stopped = [event for event in run.events if event["event"] == "attempt_stopped"][-1]
    assert (stopped["cause"], stopped["node"], stopped["rank"]) == ("rank_crash", "n2", 1)

    os.kill(run.agent("n3"), signal.SIGKILL)
    run.training(3)
    assert run.last("attempt_started")["world"] == 3
    found = Incidents.of(run.events)
    assert [incident.cause for incident in found] == ["rank_crash", "node_lost"]
    assert all(incident.recovered for incident in found)
    assert found[0].phases["detected"] < 8.0, "sooner than the shortest limit of silence"

    ranks = [run.rank(number) for number in range(3)]
    run.process.kill()
    run.process.wait()
    run.start()
    run.wait("the new supervisor has all ranks again", lambda: run.count("attempt_adopted") or run.count("attempt_started") > 3)
    if run.count("attempt_adopted"):
        assert all(alive(pid) for pid in ranks)
        last = Incidents.of(run.events)[2]
        assert (last.cause, last.went_on, last.steps_lost) == ("supervisor_lost", True, 0)
    run.wait("it goes on", lambda: run.events[-1]["event"] == "checkpoint_committed")
    run.process.terminate()
    assert run.end() == ExitCode.CANCELLED
    status = RunFolder(run.folder).status()
    assert status is not None
    assert (status.state, status.cause) == ("cancelled", "cancelled")
    assert run.last("attempt_stopped")["saved"] is True
    assert not any(alive(pid) for pid in ranks)


def test_a_supervisor_that_stays_away_finds_the_ranks_gone_and_launches_them_again(runs: Callable[..., Run]) -> None:
    run = runs(options=("--set", "limits.agent_silence_s=1.0", "--set", "limits.node_silence_s=2.0"))
    run.training(1)
    ranks = [run.rank(number) for number in range(2)]
    run.process.kill()
    run.process.wait()
    run.wait("the agents stop their ranks by themselves", lambda: not any(alive(pid) for pid in ranks))
    run.start()
    run.training(2)
    (incident,) = Incidents.of(run.events)
    assert incident.recovered


def test_a_frozen_supervisor_blames_nobody(runs: Callable[..., Run]) -> None:
    run = runs(options=("--set", "limits.agent_silence_s=5", "--set", "limits.node_silence_s=40"))
    run.training(1)
    run.process.send_signal(signal.SIGSTOP)
    ranks = [run.rank(number) for number in range(2)]
    run.wait("the agents stop their ranks by themselves", lambda: not any(alive(pid) for pid in ranks))
    run.process.send_signal(signal.SIGCONT)
    run.training(2)
    assert run.count("agent_lost") == 0
    assert run.last("fault_detected")["cause"] == "unknown"


def test_strangers_are_not_listened_to(runs: Callable[..., Run]) -> None:
    run = runs()
    run.training(1)
    address = SupervisorAddress.read(run.folder)
    assert address is not None
    values = {
        "node": "n1", "pid": 1, "boot_id": "", "job_id": "local", "restart": 0, "address": "", "warm": True, "cold_reason": "",
        "attempt": 0, "ranks": [],
    }  # fmt: skip
    for raw in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", Hello.build("not the token", **values).to_line(), b"x" * (2 << 20)):
        with socket.create_connection((address.host, address.port), 60) as stranger:
            try:
                stranger.sendall(raw)
                assert stranger.recv(100) == b""
            except (ConnectionResetError, BrokenPipeError):
                continue
    assert run.count("agent_joined") == 2
    assert run.process.poll() is None
    before = run.count("checkpoint_committed")
    run.wait("it trains on", lambda: run.count("checkpoint_committed") > before)


def test_a_second_supervisor_of_the_same_run_is_refused(runs: Callable[..., Run]) -> None:
    run = runs()
    run.training(1)
    second = subprocess.run(run.command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert second.returncode == ExitCode.CONFIG_ERROR
    assert f"process {run.process.pid} on this machine" in second.stderr
    assert run.process.poll() is None
