"""The agent's parts by themselves: its folder, its loop, its leftovers, its spool, and what the next launcher imports."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_resilience.errors import LaunchError
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.lease import Lease
from slurm_resilience.runtime.leftovers import clear_leftovers
from slurm_resilience.runtime.local_ranks import tail
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.node_folder import NodeFolder, remove_if_free
from slurm_resilience.runtime.preload import ImportWatch, read_learned, write_learned
from slurm_resilience.runtime.processes import descendants
from slurm_resilience.runtime.stopping import Stop
from slurm_resilience.runtime.uplink import Uplink


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


def test_a_node_folder_is_private_and_empty_and_goes_away(base: Path) -> None:
    folder = NodeFolder("run-1", "node1", base=base)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700
    folder.page(1, 0).write_bytes(b"old")
    os.close(folder._lock)
    again = NodeFolder("run-1", "node1", base=base)
    assert [path.name for path in again.path.iterdir()] == ["lock"]
    again.remove()
    assert list(base.iterdir()) == []


def test_the_name_of_the_fact_socket_always_fits(base: Path) -> None:
    names = [("r" * 80, "n" * 80), ("r" * 80, "n" * 79 + "m"), ("a/b", "c d"), ("a_b", "c_d")]
    folders = [NodeFolder(run, node, base=Path("/dev/shm")) for run, node in names]
    try:
        assert len({folder.path for folder in folders}) == len(folders)
        for folder in folders:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.bind(str(folder.facts))
    finally:
        for folder in folders:
            folder.remove()


def test_a_folder_that_others_could_have_made_is_refused(base: Path) -> None:
    top = base / f"slurm-resilience-{os.geteuid()}"
    top.mkdir(mode=0o755)
    with pytest.raises(LaunchError, match="cannot be trusted"):
        NodeFolder("run", "node", base=base)
    top.rmdir()
    (base / "elsewhere").mkdir(mode=0o700)
    top.symlink_to(base / "elsewhere")
    with pytest.raises(LaunchError, match="cannot be trusted"):
        NodeFolder("run", "node", base=base)
    top.unlink()
    if os.geteuid() == 0:  # only root can stage what another user did
        top.mkdir(mode=0o700)
        os.chown(top, 12345, 12345)
        with pytest.raises(LaunchError, match="12345"):
            NodeFolder("run", "node", base=base)


def test_a_newer_holder_ends_the_older_one(base: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\nfrom slurm_resilience.runtime.node_folder import NodeFolder\n"
        f"NodeFolder('run', 'node', base=Path({str(base)!r})); print(flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    NodeFolder("run", "other", base=base).remove()
    assert holder.poll() is None
    folder = NodeFolder("run", "node", base=base)
    assert holder.wait() == -signal.SIGKILL
    folder.remove()


def test_folders_that_nobody_holds_are_swept_when_they_are_old(base: Path) -> None:
    held, free, young = (NodeFolder("run", name, base=base) for name in ("held", "free", "young"))
    for folder in (free, young):
        (folder.path / "page-1-0").write_bytes(b"x")
        os.close(folder._lock)
    for folder in (held, free):
        os.utime(folder.path, (1, 1))
    NodeFolder("run", "me", base=base)
    assert sorted(path.name for path in held.path.parent.iterdir()) == ["run-held", "run-me", "run-young"]
    assert not remove_if_free(held.path)
    assert remove_if_free(young.path)
    assert not remove_if_free(young.path)


def test_a_folder_that_is_swept_while_it_is_taken_is_made_anew(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not swept:
            swept.append(True)
            shutil.rmtree(base / f"slurm-resilience-{os.geteuid()}" / "run-node")
        real(fd, how)

    monkeypatch.setattr("slurm_resilience.runtime.node_folder.fcntl.flock", flock)
    folder = NodeFolder("run", "node", base=base)
    assert swept
    assert (folder.path / "lock").exists()


def test_a_holder_that_cannot_be_ended_is_an_error_with_a_sentence(base: Path) -> None:
    """The lock is held, but what is written in it names nobody (as after a crash between the two)."""
    folder = NodeFolder("run", "node", base=base)
    os.ftruncate(folder._lock, 0)
    with pytest.raises(LaunchError, match="does not let go"):
        NodeFolder("run", "node", base=base, patience_s=0.2)


def test_a_stop_is_not_proven_while_something_lives() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    spare = {process.pid for process in descendants(os.getpid())} - {child.pid}
    began = time.monotonic()
    stop = Stop(3, "kill", grace_s=0.5)
    while not stop.tick(spare):
        assert (child.poll() is None) or time.monotonic() - began >= 0.5
        assert stop.complaint() == ""
        time.sleep(0.01)
    assert child.wait() == -signal.SIGKILL
    assert stop.killed == {child.pid}
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_stop_complains_of_what_will_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_resilience.runtime.stopping._SAY_AFTER_S", 0.1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    others = {process.pid for process in descendants(os.getpid())} - {child.pid}
    stop = Stop(3, "kill", grace_s=0.0)
    stop._kill_at += 60  # it lives, as a process in state D would
    while not (said := stop.complaint()):
        assert not stop.tick(others)
        time.sleep(0.01)
    assert f"{child.pid} (state " in said
    assert stop.complaint() == ""
    stop.hurry(4, "silence", 0.0)
    while not stop.tick(others):
        time.sleep(0.01)
    assert (stop.attempt, stop.why) == (4, "silence")
    child.wait()


def test_work_aside_never_holds_the_loop_up() -> None:
    loop = Loop()
    answers: list[object] = []
    loop.aside(lambda: {"x": [1, None]}, answers.append, within_s=55)
    loop.aside(lambda: 1 / 0, answers.append, within_s=55)
    loop.aside(lambda: time.sleep(60), answers.append, within_s=0.3)
    loop.aside(lambda: "x" * 1_000_000, lambda text: answers.append(len(text)), within_s=55)
    assert len(list(loop.helpers())) == 4
    began = time.monotonic()
    longest = 0.0
    while len(answers) < 4:
        turn = time.monotonic()
        loop.turn(0.02)
        longest = max(longest, time.monotonic() - turn)
        assert time.monotonic() - began < 50
    assert sorted(map(str, answers)) == ["1000000", "None", "None", "{'x': [1, None]}"]
    assert longest < 20  # the work that is given up takes a minute
    assert list(loop.helpers()) == []


def test_a_callback_may_forget_another_source_of_the_same_turn() -> None:
    loop = Loop()
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def make(number: int) -> None:
        def ready() -> None:
            called.append(number)
            loop.forget(pairs[1 - number][0])
            pairs[1 - number][0].close()

        loop.watch(pairs[number][0], ready)

    make(0)
    make(1)
    for _, far in pairs:
        far.send(b"x")
    loop.turn(0.1)
    assert len(called) == 1


def test_leftovers_are_killed_and_our_own_family_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {"RESILIENCE_RUN_ID": f"t{os.getpid()}", "RESILIENCE_NODE": "a"}
    code = "import time; print(flush=True); time.sleep(600)"
    env = {**os.environ, **identity}
    left = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**env, "RESILIENCE_NODE": "b"})
    for child in (left, other):
        assert child.stdout is not None
        child.stdout.readline()
    said: list[str] = []
    us = (
        "from slurm_resilience.runtime.leftovers import clear_leftovers\n"
        f"said = []\nclear_leftovers({identity!r}, say=said.append)\nprint(len(said))"
    )
    done = subprocess.run([sys.executable, "-c", us], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert left.wait() == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
    clear_leftovers(identity, say=said.append)
    assert said == []


def test_the_spool_is_bounded_and_drops_the_curve_first(tmp_path: Path) -> None:
    uplink = Uplink(
        Loop(), tmp_path, Lease(1, 3, 0), greet=lambda *_: None, welcomed=lambda: None, obey=lambda _: None, say=lambda _: None
    )  # type: ignore[arg-type, return-value]  # fmt: skip
    uplink.tell(m.Warned("SIGTERM", 0.0))
    for step in range(900):
        uplink.tell(m.Fact(1, 0, "step_reported", {"step": step}, 0.0))
    for step in range(800):
        uplink.tell(m.Fact(1, 0, "checkpoint_committed", {"step": step}, 0.0))
    spool = list(uplink._spool)
    assert len(spool) == 1000
    assert spool[0] == m.Warned("SIGTERM", 0.0)
    curve = [message.fields["step"] for message in spool if isinstance(message, m.Fact) and message.fact == "step_reported"]
    assert curve == list(range(701, 900))
    for step in range(400):
        uplink.tell(m.Fact(1, 0, "checkpoint_committed", {"step": 800 + step}, 0.0))
    spool = list(uplink._spool)
    assert len(spool) == 1000
    assert spool[0] == m.Warned("SIGTERM", 0.0)
    assert spool[-1] == m.Fact(1, 0, "checkpoint_committed", {"step": 1199}, 0.0)


def test_the_tail_of_a_log_is_bounded_in_every_way(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert tail(log) == []
    log.write_bytes(b"a\n" * 100 + b"\xff last without end")
    assert tail(log) == ["a"] * 19 + ["\ufffd last without end"]
    log.write_bytes(b"z" * 1_000_000)
    assert [len(line) for line in tail(log)] == [1000]


def test_what_was_learned_is_kept_in_the_run_folder(tmp_path: Path) -> None:
    assert read_learned(tmp_path) == []
    write_learned(tmp_path, ["torch._dynamo", "wave"])
    assert read_learned(tmp_path) == ["torch._dynamo", "wave"]
    for bad in ("", "[]", '{"v": 9, "modules": ["x"]}', '{"v": 1, "modules": "x"}'):
        (tmp_path / "preload.json").write_text(bad)
        assert read_learned(tmp_path) == []


def test_imports_are_told_once_the_rank_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "imports"
    watch = ImportWatch(path)
    assert watch.fresh() == []
    path.write_text("a\nb\na\n")
    os.utime(path, (time.time() + 60, time.time() + 60))  # however long it takes to ask
    assert watch.fresh() == []
    os.utime(path, (time.time() - 5, time.time() - 5))
    assert watch.fresh() == ["a", "b"]
    assert watch.fresh() == []
    with open(path, "a") as file:
        file.write("c\n")
    os.utime(path, (time.time() - 5, time.time() - 5))
    assert watch.fresh() == ["c"]
