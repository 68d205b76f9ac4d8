"""An agent and a supervisor that dies, falls silent, comes back, is somebody else, or talks nonsense."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil

from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.processes import is_alive
from tests.unit.runtime.agent_stage import Stage
from tests.unit.runtime.test_agent import FAMILY, PAGED, SLEEPER

SILENCE_S, LOST_S = 6.0, 40.0
# As far apart as they may be, and long enough for a machine that is held up: what stops at the first is early for the second.
LIMITS = {"agent_silence_s": SILENCE_S, "node_silence_s": LOST_S}


def test_an_agent_that_hears_nothing_stops_its_ranks_before_others_are_launched(tmp_path: Path) -> None:
    with Stage(tmp_path, limits=LIMITS) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        before = len(stage.alive())
        stage.launch(peer, 1, 2)
        stage.until(lambda: "up" in stage.log(1) and "up" in stage.log(1, 1))
        assert len(stage.alive()) == before + 8
        peer.mute = True  # it hears, and answers nothing
        stage.until(lambda: len(stage.alive()) == before, LOST_S - 5.0, "the ranks are gone")
        told = re.search(r"has not heard us for ([0-9.]+) s", (tmp_path / "logs" / "agent-node1.log").read_text())
        assert told is not None
        assert float(told[1]) >= SILENCE_S
        again = stage.until(lambda: stage.peer(after=peer))
        assert (again.hello.attempt, again.hello.ranks) == (0, [])
        (stopped,) = stage.until(lambda: again.of(m.Stopped))
        assert (stopped.attempt, stopped.why) == (1, "silence")
        stage.launch(again, 2)
        stage.started(again, 2)


def test_ranks_live_through_a_supervisor_that_is_replaced_in_time(tmp_path: Path) -> None:
    with Stage(tmp_path, limits=LIMITS) as stage:
        stage.script(PAGED)
        peer = stage.join()
        stage.launch(peer, 1, 2)
        first, second = stage.started(peer, 1)
        stage.until(lambda: len(peer.of(m.Fact, fact="first_step")) == 2)
        stage.hang_up()
        os.kill(first.pid, signal.SIGKILL)  # while nobody listens
        time.sleep(0.3)
        stage.listen()
        again = stage.until(lambda: stage.peer(after=peer))
        exit_ = stage.until(lambda: again.of(m.Exit))[0]
        assert (exit_.rank, exit_.signal) == (0, "SIGKILL")
        stage.hang_up()
        stage.listen()
        again = stage.until(lambda again=again: stage.peer(after=again))
        assert (again.hello.attempt, again.hello.ranks) == (1, [1])
        stage.until(lambda: again.of(m.Warm, warm=True))
        stage.still(SILENCE_S + 0.5, lambda: is_alive(second))
        again.send(m.Order(attempt=1, stop=True, save=0, deadline=None, cause="done"))
        stage.until(lambda: again.of(m.Exit, rank=1, done=True))


def test_an_exit_that_the_last_supervisor_may_not_have_written_down_comes_again(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("raise SystemExit(3)")
        peer = stage.join()
        stage.launch(peer, 1)
        (first,) = stage.until(lambda: peer.of(m.Exit))
        stage.hang_up()
        stage.listen()
        again = stage.until(lambda: stage.peer(after=peer))
        assert stage.until(lambda: again.of(m.Exit)) == [first]


def test_facts_are_kept_while_there_is_no_supervisor(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(PAGED)
        peer = stage.join()
        stage.hang_up()
        time.sleep(0.1)
        stage.listen()
        again = stage.until(lambda: stage.peer(after=peer))
        stage.launch(again, 1)
        stage.started(again, 1)
        stage.until(lambda: again.of(m.Fact))
        stage.hang_up()
        from slurm_resilience.progress.facts import FactSender

        folder = Path("/dev/shm", f"slurm-resilience-{os.geteuid()}", f"{stage.run_id}-node1")
        sender = FactSender(folder / "facts", attempt=1, rank=0)
        for step in range(20):
            assert sender.send("checkpoint_committed", step=step)
        FactSender(folder / "facts", attempt=0, rank=0).send("checkpoint_committed", step=99)  # an older attempt
        os.kill(stage.agents[0].pid, signal.SIGUSR2)  # the guardian ignores it
        os.kill(again.hello.pid, signal.SIGUSR2)
        stage.listen()
        last = stage.until(lambda: stage.peer(after=again))
        stage.until(lambda: last.of(m.Warned, signal="SIGUSR2"))
        assert [fact.fields["step"] for fact in last.of(m.Fact, fact="checkpoint_committed")] == list(range(20))


def test_a_supervisor_that_comes_back_too_late_finds_the_ranks_stopped(tmp_path: Path) -> None:
    with Stage(tmp_path, limits=LIMITS) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        stage.hang_up()
        began = time.monotonic()
        while is_alive(rank):
            assert time.monotonic() - began < LOST_S - 5.0
            time.sleep(0.02)
        stage.listen()
        again = stage.until(lambda: stage.peer(after=peer))
        assert (again.hello.attempt, again.hello.ranks) == (0, [])


def test_an_agent_that_was_stopped_for_less_than_its_lease_is_no_alarm(tmp_path: Path) -> None:
    with Stage(tmp_path, limits=LIMITS) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        for _ in range(2):
            stage.still(0.7, lambda: is_alive(rank))
            os.kill(peer.hello.pid, signal.SIGSTOP)
            stage.still(SILENCE_S / 2, lambda: True)
            os.kill(peer.hello.pid, signal.SIGCONT)
        stage.still(SILENCE_S + 0.5, lambda: is_alive(rank) and peer.connection.closed is None)
        assert "did not run for" in (tmp_path / "logs" / "agent-node1.log").read_text()
        assert not peer.of(m.Stopped)


def test_the_guardian_stops_the_ranks_of_an_agent_that_cannot(tmp_path: Path) -> None:
    """Stopped, or stuck in the kernel: the supervisor gives the node up in the end, and may launch elsewhere.

    That the guardian's time is over before the supervisor's is arithmetic of the lease: see test_lease.py.
    """
    silence_s, lost_s = 3.5, 8.0
    with Stage(tmp_path, limits={"agent_silence_s": silence_s, "node_silence_s": lost_s}) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        os.kill(peer.hello.pid, signal.SIGSTOP)
        began = time.monotonic()
        stage.until(lambda: not is_alive(rank), lost_s + 10.0)  # seconds more than it takes, for a machine that is held up
        assert time.monotonic() - began > silence_s, "the agent itself is asked first"
        log = tmp_path / "logs" / "agent-node1.log"
        stage.until(lambda: "killed 1 processes in its place" in log.read_text())
        stage.hang_up()  # as a supervisor does that has given the node up
        stage.listen()
        os.kill(peer.hello.pid, signal.SIGCONT)
        again = stage.until(lambda: stage.peer(after=peer))
        assert again.hello.pid == peer.hello.pid, "the agent itself lives on"
        assert again.hello.ranks == []
        stage.launch(again, 2)
        assert is_alive(stage.started(again, 2)[0])


def test_a_node_that_was_stopped_for_longer_than_its_lease_stops_its_ranks_when_it_wakes(tmp_path: Path) -> None:
    lost_s = 6.0
    with Stage(tmp_path, limits={"agent_silence_s": 4.0, "node_silence_s": lost_s}) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        guardian = psutil.Process(peer.hello.pid).ppid()
        for process in (guardian, peer.hello.pid):
            os.kill(process, signal.SIGSTOP)
        stage.still(lost_s + 0.5, lambda: is_alive(rank))
        stage.hang_up()  # as a supervisor does that has given the node up
        stage.listen()
        os.kill(guardian, signal.SIGCONT)
        os.kill(peer.hello.pid, signal.SIGCONT)
        log = tmp_path / "logs" / "agent-node1.log"
        stage.until(lambda: not is_alive(rank))
        assert "its ranks are stopped until the supervisor says" in log.read_text()
        again = stage.until(lambda: stage.peer(after=peer))
        stage.until(lambda: again.of(m.Stopped) or not again.hello.ranks)


def test_a_node_that_was_suspended_with_its_supervisor_goes_on(tmp_path: Path) -> None:
    """Nobody has given it up: the first answer to a beat after waking says so."""
    silence_s, lost_s = 4.0, 6.0
    with Stage(tmp_path, limits={"agent_silence_s": silence_s, "node_silence_s": lost_s}) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        everybody = (psutil.Process(peer.hello.pid).ppid(), peer.hello.pid, rank.pid)
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        stage.still(lost_s + 0.5, lambda: is_alive(rank))
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        log = tmp_path / "logs" / "agent-node1.log"
        stage.until(lambda: "the supervisor still wants them" in log.read_text())
        stage.until(lambda: runs(rank.pid))
        stage.still(silence_s + 0.5, lambda: is_alive(rank) and peer.connection.closed is None)
        assert not peer.of(m.Stopped)


def runs(pid: int) -> bool:
    """It is there, and not stopped by a signal."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_old_answers_do_not_renew_the_lease(tmp_path: Path) -> None:
    """A cut in one direction: the supervisor is heard, and does not hear."""
    with Stage(tmp_path, limits=LIMITS) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        stage.until(lambda: peer.connection.seen >= 1)
        peer.mute = True
        heard = peer.connection.seen
        began = time.monotonic()
        while is_alive(rank):
            assert time.monotonic() - began < LOST_S - 5.0
            peer.send(m.Ping(heard))
            stage.pump(0.1)


def test_nonsense_on_the_wire_is_logged_and_hurts_nobody(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        sock = peer.connection.socket
        for line in (
            b"\x00\xff\xfe",
            b"[]",
            b"{}",
            b'{"m":"launch"}',
            b'{"m":"kill","attempt":"1"}',
            b'{"m":["x"]}',
            b"[" * 9000,
            b"",
        ):
            sock.sendall(line + b"\n")
        peer.send(m.Warned("SIGTERM", 0.0))  # a message of ours, in the wrong direction
        peer.send(m.Kill(0))
        stage.until(lambda: len(peer.of(m.Refused)) == 2)
        stage.still(0.3, lambda: is_alive(rank))
        assert peer.connection.closed is None
        log = (tmp_path / "logs" / "agent-node1.log").read_text()
        assert log.count("garbage") == 8
        # A line without an end is not read for ever: the line is dropped, and the agent comes back.
        peer.connection._out += b"x" * (2 << 20)
        again = stage.until(lambda: stage.peer(after=peer))
        assert again.hello.ranks == [0]
        assert is_alive(rank)


def test_whoever_does_not_know_the_token_is_not_obeyed(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        known, stage.token = stage.token, "another"
        stage.start()
        hellos = stage.until(lambda: [hello for peer in stage.peers for hello in peer.of(m.Hello)])
        assert not hellos[0].proves("another")
        assert known not in str(hellos[0]), "the token itself crossed the wire"
        stranger = stage.peers[0]
        stranger.send(m.Welcome.build("another", hellos[0]))
        stage.launch(stranger, 1)
        stage.until(lambda: stranger.connection.closed)
        stage.token = known
        peer = stage.until(stage.peer, what="it comes back to the real one")
        stage.until(lambda: peer.of(m.Beat))
        assert not stage.log(1)
        assert not any(message for peer in stage.peers for message in peer.of(m.Launched))


def test_an_agent_waits_with_patience_for_its_supervisor(tmp_path: Path) -> None:
    """No file, a torn file, a port where nobody listens, one where nobody answers: it goes on trying."""
    with Stage(tmp_path) as stage:
        address = tmp_path / "supervisor.json"
        good = address.read_text()
        address.unlink()
        stage.start()
        time.sleep(0.4)
        address.write_text(good[: len(good) // 2])
        time.sleep(0.4)
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            SupervisorAddress(1, "127.0.0.1", deaf.getsockname()[1], "x", 1, "", "7", 0).write(tmp_path)
            time.sleep(0.5)
        SupervisorAddress(1, "127.0.0.1", 1, "x", 1, "", "7", 0, others=["::1"]).write(tmp_path)
        time.sleep(0.5)
        assert stage.agents[0].poll() is None
        address.write_text(good)
        stage.until(stage.peer)


def test_an_agent_without_any_supervisor_ends_itself(tmp_path: Path) -> None:
    with Stage(tmp_path, limits={"orphan_s": 6.0}) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        stage.hang_up()
        assert stage.agents[0].wait(50) == 83
        assert not stage.alive()


def test_an_agent_of_an_earlier_allocation_ends_itself(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        stage.started(peer, 1)
        stage.hang_up()
        stage.restart = 1
        stage.listen()
        assert stage.until(lambda: stage.agents[0].poll() is not None, 50.0)  # before an orphan would
        assert not stage.alive()
        # the same from the first look on, when Slurm says what it was started for
        late = stage.start(SLURM_JOB_ID="7")
        assert stage.until(lambda: late.poll() is not None, 50.0)
        right = stage.start(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
        stage.until(lambda: stage.peer(after=peer))
        assert right.poll() is None


def test_an_agent_beats_as_seldom_as_a_supervisor_of_thousands_asks_for(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.beat_every_s = 30.0
        peer = stage.join(warm=False)
        stage.until(lambda: peer.of(m.Beat), what="the beat that goes with a welcome")
        before = len(peer.of(m.Beat))
        stage.still(3 * m.BEAT_EVERY_S, lambda: len(peer.of(m.Beat)) <= before + 1)
