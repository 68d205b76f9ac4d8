"""Launcher and ranks inside a wrapper, such as a container's exec: it may exec, fork, or put them into a PID namespace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.processes import descendants, is_alive
from tests.unit.runtime.agent_stage import Stage

SLEEPER = "import os, time\nprint('up', os.environ.get('WRAPPED'), flush=True)\nwhile True: time.sleep(0.05)\n"


def wrap(stage: Stage, *words: str) -> None:
    """Put the wrapper into the run folder, as `--wrap` does."""
    path = stage.run_dir / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wrap": words}))


def test_a_wrapper_that_execs_is_warm_as_ever(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        wrap(stage, "env", "WRAPPED=yes")
        stage.script("import os, sys; print(os.environ.get('WRAPPED'), sys.argv)")
        peer = stage.join()
        stage.launch(peer, 1)
        stage.until(lambda: peer.of(m.Exit))
        assert peer.of(m.Launched)[0].warm
        # what the wrapper sets holds for the launcher; the rank's own environment is the one that was asked for
        assert stage.log(1).strip() == "None ['train.py']"


@pytest.mark.parametrize("warm", [True, False])
def test_a_wrapper_that_stays_is_spared_with_the_launcher_and_killed_with_the_agent(warm: bool, tmp_path: Path) -> None:
    with Stage(tmp_path, warm=warm) as stage:
        wrap(stage, "sh", "-c", '"$@"; exit $?', "wrapper")
        stage.script(SLEEPER)
        peer = stage.join()
        for attempt in (1, 2):
            stage.launch(peer, attempt, 2)
            stage.until(lambda attempt=attempt: all("up" in stage.log(attempt, rank) for rank in (0, 1)))
            # a rank's first line may be there before the word of its launch
            launched = stage.until(lambda attempt=attempt: peer.of(m.Launched, attempt=attempt))[0]
            assert launched.warm is warm
            peer.send(m.Kill(attempt))
            stage.until(lambda attempt=attempt: peer.of(m.Stopped, attempt=attempt))
            assert len(stage.alive()) == (3 if warm else 1)
        family = stage.alive()
        os.kill(peer.hello.pid, signal.SIGKILL)
        stage.until(lambda: not any(map(is_alive, family)))


def test_a_wrapper_with_its_own_pid_namespace_means_cold_starts_with_the_reason(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets its users make no PID namespaces")
    with Stage(tmp_path) as stage:
        wrap(stage, *unshare)
        stage.script(SLEEPER)
        peer = stage.join()
        assert "PID namespace" in peer.of(m.Warm)[-1].reason
        stage.launch(peer, 1)
        stage.until(lambda: "up" in stage.log(1))
        ranks = descendants(peer.hello.pid)
        assert ranks
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped))
        assert not any(map(is_alive, ranks))


def test_a_wrapper_that_does_not_exist_is_an_error_of_the_ranks(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        wrap(stage, "no-such-container", "exec", "img.sif")
        stage.script(SLEEPER)
        peer = stage.join()
        assert "died 3 times before it was warm" in peer.of(m.Warm, usable=True)[-1].reason
        stage.launch(peer, 1)
        exit_ = stage.until(lambda: peer.of(m.Exit))[0]
        assert (exit_.code, "no-such-container" in exit_.tail[-1]) == (127, True)
        assert "cannot start no-such-container" in (stage.run_dir / "logs" / "launcher-node1.log").read_text()


DEAF_DNS = """
set -e
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add d0 type veth peer name d1; ip link set d1 up; ip addr add 10.9.9.1/24 dev d0; ip link set d0 up
ip neigh add 10.9.9.254 lladdr 02:00:00:00:00:01 dev d0; ip route add default via 10.9.9.254
printf "nameserver 10.8.8.8\\noptions timeout:30 attempts:2\\n" > "$1"; mount --bind "$1" /etc/resolv.conf
exec "$2" -c "$3" "$4"
"""
MEET = """
import sys, time
from pathlib import Path
from slurm_resilience.runtime import messages as m
from tests.unit.runtime.agent_stage import Stage
with Stage(Path(sys.argv[1]), preload=["torch"]) as stage:
    stage.script("import torch.distributed as d; d.init_process_group('gloo'); print('met', flush=True); d.barrier()")
    peer = stage.join()
    peer.send(m.Store(1))
    port = stage.until(lambda: peer.of(m.StoreReady))[0].port
    began = time.monotonic()
    stage.launch(peer, 1, 2, master_addr="10.9.9.1", master_port=port)
    stage.until(lambda: all("met" in stage.log(1, rank) for rank in (0, 1)))
    print("MET", time.monotonic() - began, flush=True)
"""


def test_ranks_do_not_wait_for_a_name_server_that_never_answers(tmp_path: Path) -> None:
    """c10d looks every peer up in reverse: 60 s for each process here, unless the launcher has been through it."""
    unshare = ["unshare", "--map-root-user", "--net", "--mount"]
    if not shutil.which("ip") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine has no ip command, or lets its users make no network namespaces")
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*unshare, "bash", "-c", DEAF_DNS, "deaf", str(tmp_path / "resolv.conf"), sys.executable, MEET, str(tmp_path / "run")],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    met = [line for line in done.stdout.splitlines() if line.startswith("MET")]
    assert met, done.stdout + done.stderr
    assert float(met[0].split()[1]) < 30
