"""A real agent with a real launcher and real ranks: starting, reporting, stopping, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.processes import descendants, is_alive, look
from tests.unit.runtime.agent_stage import PATIENCE_S, Stage

SLEEPER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)\n"

# A rank with the kinds of children that outlive a careless kill: a session of its own, an orphan, a worker that ignores TERM.
FAMILY = """
import os, signal, subprocess, sys, time
ready, told = os.pipe()
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
between = os.fork()
if between == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    os.setpgid(0, 0)
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
    os.write(told, b'x')
    time.sleep(600)
os.waitpid(between, 0)
os.read(ready, 1)
print('up', flush=True)
time.sleep(600)
"""

PAGED = """
import os, sys, time
from slurm_resilience.progress.page import PageWriter, Phase
from slurm_resilience.progress.facts import FactSender
page = PageWriter(os.environ['RESILIENCE_PAGE'])
facts = FactSender(os.environ['RESILIENCE_FACTS'], attempt=int(os.environ['RESILIENCE_ATTEMPT']), rank=int(os.environ['RANK']))
page.enter(Phase.STEP)
step = 0
while not page.orders().stop:
    step += 1
    page.beat(step)
    if step == 1: facts.send('first_step', step=step, loss=float('nan'))
    time.sleep(0.01)
facts.send('stopped', step=step, why=page.orders().cause)
page.done()
"""


def test_an_agent_says_who_it_is_and_forks_its_ranks(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        hello = peer.hello
        assert hello is not None
        assert (hello.node, hello.job_id, hello.restart, hello.attempt, hello.ranks) == ("node1", "7", 0, 0, [])
        assert hello.address == "127.0.0.1"
        assert hello.pid in {process.pid for process in descendants(stage.agents[0].pid)}
        stage.launch(peer, 1, 3, first=4, world=8)
        processes = stage.started(peer, 1)
        (launched,) = peer.of(m.Launched)
        assert (launched.warm, launched.reason, sorted(launched.pids)) == (True, "", ["4", "5", "6"])
        beat = stage.until(lambda: [beat for beat in peer.of(m.Beat, attempt=1) if len(beat.ranks) == 3])[-1]
        assert beat.progress()[5].step == -1
        assert all(is_alive(process) for process in processes)


def test_the_environment_is_that_of_torchrun_and_the_contract(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("import os, json; print(json.dumps(dict(os.environ)))")
        peer = stage.join(TO_GO="x", KEPT="y", OMP_NUM_THREADS="3")
        stage.launch(peer, 5, 1, first=2, world=4, env={"TO_GO": None, "NEW": "1"}, master_port=4242, header="# after a crash")
        stage.until(lambda: peer.of(m.Exit))
        header, text = stage.log(5, 2).splitlines()
        assert header == "# after a crash"
        import json

        seen = json.loads(text)
        wanted = {
            "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "NEW": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4242", "TORCHELASTIC_USE_AGENT_STORE": "True", "KEPT": "y",
            "TORCHELASTIC_RESTART_COUNT": "5", "TORCHELASTIC_RUN_ID": stage.run_id, "RESILIENCE_ATTEMPT": "5",
            "RESILIENCE_NODE": "node1", "OMP_NUM_THREADS": "3", "RESILIENCE_RUN_DIR": str(tmp_path), "RESILIENCE_JOB_ID": "7",
        }  # fmt: skip
        assert {name: seen.get(name) for name in wanted} == wanted
        assert not {"TO_GO", "OPENBLAS_NUM_THREADS", "RES_OPTIONS", "CUDA_VISIBLE_DEVICES"} & set(seen) - set(os.environ)


def test_a_killed_rank_is_reported_at_once_with_its_last_words(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("import time\nfor n in range(30): print('line', n)\nprint('up', flush=True)\ntime.sleep(600)")
        stage.beat_every_s = 100.0  # what waits for the next beat is not told at once
        peer = stage.join()
        stage.launch(peer, 1, 2)
        first, second = stage.started(peer, 1)
        stage.until(lambda: "up" in stage.log(1) and "up" in stage.log(1, 1))
        beats = len(peer.of(m.Beat))
        os.kill(first.pid, signal.SIGKILL)
        exit_ = stage.until(lambda: peer.of(m.Exit), 50.0)[0]
        assert len(peer.of(m.Beat)) == beats
        assert (exit_.attempt, exit_.rank, exit_.code, exit_.signal, exit_.done, exit_.step) == (1, 0, -9, "SIGKILL", False, -1)
        assert exit_.tail == [*(f"line {n}" for n in range(11, 30)), "up"]
        stage.still(0.5, lambda: is_alive(second))
        assert len(peer.of(m.Exit)) == 1


def test_progress_orders_and_facts_cross_the_page_and_the_socket(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(PAGED)
        peer = stage.join()
        stage.launch(peer, 1, 2)
        stage.until(
            lambda: [b for b in peer.of(m.Beat) if len(b.ranks) == 2 and all(p.step > 3 for p in b.progress().values())]
        )
        stage.until(lambda: len(peer.of(m.Fact, fact="first_step")) == 2)
        assert {fact.rank for fact in peer.of(m.Fact, fact="first_step", attempt=1)} == {0, 1}
        peer.send(m.Order(attempt=9, stop=True, save=1, deadline=None, cause="nobody"))
        assert stage.until(lambda: peer.of(m.Refused))[0].what == "order"
        peer.send(m.Order(attempt=1, stop=True, save=1, deadline=time.time() + 60, cause="preemption"))
        stage.until(lambda: len(peer.of(m.Exit)) == 2)
        assert all((e.code, e.done) == (0, True) and e.step > 3 for e in peer.of(m.Exit))
        assert [fact.fields["why"] for fact in peer.of(m.Fact, fact="stopped")] == ["preemption"] * 2


def test_a_stop_takes_whole_families_and_proves_it(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        before = len(stage.alive())
        stage.launch(peer, 1, 2)
        stage.until(lambda: "up" in stage.log(1) and "up" in stage.log(1, 1))
        assert len(stage.alive()) == before + 8
        peer.send(m.Kill(1))
        (stopped,) = stage.until(lambda: peer.of(m.Stopped))
        assert (stopped.attempt, stopped.killed, stopped.why) == (1, 8, "kill")
        assert len(stage.alive()) == before
        assert not list(Path("/dev/shm", f"slurm-resilience-{os.geteuid()}", f"{stage.run_id}-node1").glob("page*"))


@pytest.mark.parametrize("victim", ["agent", "guardian"])
def test_nothing_outlives_an_agent_that_is_killed(victim: str, tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        stage.launch(peer, 1, 2)
        stage.until(lambda: "up" in stage.log(1) and "up" in stage.log(1, 1))
        family = stage.alive()
        assert len(family) == 1 + 1 + 8  # agent, launcher, two ranks with three more each
        assert peer.hello is not None
        os.kill(peer.hello.pid if victim == "agent" else stage.agents[0].pid, signal.SIGKILL)
        stage.until(lambda: not any(map(is_alive, family)), what="all of them are gone")
        assert stage.agents[0].wait(PATIENCE_S) == (137 if victim == "agent" else -9)
        folder = Path("/dev/shm", f"slurm-resilience-{os.geteuid()}", f"{stage.run_id}-node1")
        stage.until(lambda: not folder.exists())


def test_a_launcher_that_is_killed_takes_its_ranks_along_and_comes_back(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1, 2)
        ranks = stage.started(peer, 1)
        os.kill(ranks[0].parent, signal.SIGKILL)
        stage.until(lambda: len(peer.of(m.Exit)) == 2)
        assert {exit_.signal for exit_ in peer.of(m.Exit)} == {"SIGKILL"}
        assert not any(map(is_alive, ranks))
        stage.until(lambda: len(peer.of(m.Warm, usable=True, warm=True)) == 2)
        assert peer.of(m.Warm, usable=False)
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped))
        stage.launch(peer, 2, 2)
        assert len(stage.started(peer, 2)) == 2


def test_messages_of_older_attempts_are_refused(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 5)
        (rank,) = stage.started(peer, 5)
        stage.launch(peer, 5)
        stage.launch(peer, 4)
        peer.send(m.Kill(4))
        peer.send(m.Store(4))
        peer.send(m.Ping(0))
        stage.until(lambda: len(peer.of(m.Refused)) == 4)
        assert [(refused.what, refused.attempt) for refused in peer.of(m.Refused)] == [
            ("launch", 5), ("launch", 4), ("kill", 4), ("store", 4),
        ]  # fmt: skip
        stage.still(0.3, lambda: is_alive(rank))
        stage.launch(peer, 6)  # without a kill: the older one is stopped first
        stage.started(peer, 6)
        assert not is_alive(rank)


def test_what_slurm_sends_to_every_process_of_a_step_kills_nobody(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1, 2)
        stage.started(peer, 1)
        everybody = [*descendants(stage.agents[0].pid), look(stage.agents[0].pid)]
        assert len(everybody) == 5
        for sig in (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1):
            for process in everybody:
                assert process is not None
                os.kill(process.pid, sig)
        stage.until(lambda: {warned.signal for warned in peer.of(m.Warned)} == {"SIGTERM", "SIGUSR1", "SIGUSR2"})
        stage.still(0.5, lambda: all(process is not None and is_alive(process) for process in everybody))
        assert not peer.of(m.Exit)


def test_a_stop_with_grace_ends_a_plain_program_by_term(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        peer = stage.join()
        stage.launch(peer, 1)
        stage.started(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        peer.send(m.Kill(1, grace_s=300.0))
        (stopped,) = stage.until(lambda: peer.of(m.Stopped))
        assert (stopped.killed, [exit_.signal for exit_ in peer.of(m.Exit)]) == (0, ["SIGTERM"])


def test_a_stop_with_grace_lets_a_handler_save_and_then_kills(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("import signal, time\nsignal.signal(15, lambda *_: print('saving', flush=True))\nprint('up', flush=True)\n"
                     "while True: time.sleep(0.05)")  # fmt: skip
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        began = time.monotonic()
        peer.send(m.Kill(1, grace_s=7.0))  # a rank of a busy machine gets to its handler in that time
        (stopped,) = stage.until(lambda: peer.of(m.Stopped))
        assert stopped.killed == 1
        assert time.monotonic() - began >= 7.0
        assert "saving" in stage.log(1)


def test_a_rank_that_raises_tells_the_exception_before_it_ends(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("def f():\n    raise ValueError('bad shape')\nf()")
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: peer.of(m.Exit))
        (fact,) = peer.of(m.Fact)
        assert (fact.fact, fact.fields["type"], fact.fields["message"]) == ("exception", "ValueError", "bad shape")
        assert "line 2, in f" in fact.fields["traceback"]
        assert "launcher.py" not in fact.fields["traceback"]
        assert peer.of(m.Exit)[0].tail[-1] == "ValueError: bad shape"


def test_a_command_that_is_no_python_starts_as_it_is(tmp_path: Path) -> None:
    with Stage(tmp_path, argv=["bash", "-c", 'echo "rank $RANK"; kill -TERM $$; exit 7']) as stage:
        peer = stage.join()
        stage.launch(peer, 1, 2)
        stage.until(lambda: len(peer.of(m.Exit)) == 2)
        assert [(exit_.code, exit_.tail) for exit_ in sorted(peer.of(m.Exit), key=lambda e: e.rank)] == [
            (7, ["rank 0"]), (7, ["rank 1"]),
        ]  # fmt: skip
        (launched,) = peer.of(m.Launched)
        assert (launched.warm, launched.reason) == (False, "'bash' is not a Python command that can be forked")


@pytest.mark.parametrize(
    ("argv", "code"), [(["no-such-program"], 127), (["/etc/passwd"], 126), (["python-nowhere3", "x.py"], 127)]
)
def test_a_command_that_cannot_start_ends_as_in_a_shell(argv: list[str], code: int, tmp_path: Path) -> None:
    with Stage(tmp_path, argv=argv) as stage:
        peer = stage.join()
        stage.launch(peer, 1)
        exit_ = stage.until(lambda: peer.of(m.Exit))[0]
        assert exit_.code == code
        assert argv[0] in exit_.tail[-1]


@pytest.mark.parametrize("warm", [True, False])
def test_a_folder_that_is_gone_is_a_plain_error_of_the_rank(warm: bool, tmp_path: Path) -> None:
    with Stage(tmp_path, warm=warm) as stage:
        peer = stage.join()
        stage.launch(peer, 1, cwd="/nowhere/at/all")
        exit_ = stage.until(lambda: peer.of(m.Exit))[0]
        assert exit_.code in (1, 127)
        assert "/nowhere/at/all" in " ".join(exit_.tail)


def test_a_newer_agent_replaces_the_older_one_and_what_it_left(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        family = stage.alive()
        stage.start()
        newer = stage.until(lambda: stage.peer(after=peer))
        assert not any(map(is_alive, family))
        stage.until(lambda: stage.agents[0].poll() is not None, what="the older one's guardian ends")
        assert (Path("/dev/shm", f"slurm-resilience-{os.geteuid()}", f"{stage.run_id}-node1") / "facts").exists()
        stage.launch(newer, 2)
        stage.started(newer, 2)


def test_what_no_agent_is_left_to_kill_is_killed_by_the_next_one(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        family = stage.alive()
        assert peer.hello is not None
        os.kill(stage.agents[0].pid, signal.SIGSTOP)  # a guardian that cannot act
        os.kill(peer.hello.pid, signal.SIGKILL)
        os.kill(stage.agents[0].pid, signal.SIGKILL)
        stage.agents[0].wait()
        left = [process for process in family if is_alive(process)]
        assert left, "nothing to clear up: this test shows nothing"
        stage.start()
        stage.until(lambda: stage.peer(after=peer))
        assert not any(map(is_alive, left))


def test_two_nodes_of_one_run_on_one_machine_leave_each_other_alone(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SLEEPER)
        one, two = stage.join("node1"), stage.join("node2")
        for number, peer in enumerate((one, two)):
            stage.launch(peer, 1, 1, first=number, world=2)
        (first,), (second,) = stage.started(one, 1), stage.started(two, 1)
        one.send(m.Quit("test"))
        assert stage.until(lambda: stage.agents[0].poll() is not None)
        assert stage.agents[0].returncode == 0
        assert not is_alive(first)
        stage.still(0.3, lambda: is_alive(second))


def test_quit_leaves_nothing(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(FAMILY)
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        family = stage.alive()
        peer.send(m.Quit())
        stage.until(lambda: stage.agents[0].poll() is not None)
        assert stage.agents[0].returncode == 0
        assert not any(map(is_alive, family))
        assert not Path("/dev/shm", f"slurm-resilience-{os.geteuid()}", f"{stage.run_id}-node1").exists()


def test_a_folder_without_a_run_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "slurm_resilience.runtime.agent", "--run-dir", str(tmp_path), "--node", "n"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 78
    assert "is not a run folder" in done.stderr


@pytest.mark.parametrize("warm", [True, False])
def test_a_rank_is_found_by_its_name_and_by_the_users_command(tmp_path: Path, warm: bool) -> None:
    with Stage(tmp_path) as stage:
        stage.script("import time, threading\nprint('up', flush=True)\ntime.sleep(600)")
        peer = stage.join()
        stage.launch(peer, 1, 2, first=3, world=8, wait_warm=warm)
        ranks = stage.started(peer, 1)
        stage.until(lambda: all("up" in stage.log(1, rank) for rank in (3, 4)))
        for rank, process in zip((3, 4), ranks, strict=True):
            place = Path(f"/proc/{process.pid}")
            assert (place / "comm").read_text() == f"sr-rank-{rank}\n"
            words = (place / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            assert words[0] == f"sr-rank-{rank}".encode()
            assert b"launcher.py" not in b" ".join(words)


def test_an_error_of_ours_tells_its_code_and_no_step_where_none_was_taken(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("from slurm_resilience.errors import ConfigError\nraise ConfigError('of another model')")
        peer = stage.join()
        stage.launch(peer, 1, 1)
        (fact,) = stage.until(lambda: peer.of(m.Fact, fact="exception"))
        assert (fact.fields["type"], fact.fields["exit_code"]) == ("ConfigError", 78)
        assert "step" not in fact.fields
