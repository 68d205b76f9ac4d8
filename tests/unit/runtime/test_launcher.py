"""The launcher: what makes it warm, what forbids a fork, and how it learns what to import."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import pytest

from slurm_resilience.runtime import forkable
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.processes import descendants
from tests.unit.runtime.agent_stage import Peer, Stage

SLOW = "import time; time.sleep({})\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
OURS = "slurm_resilience.progress.page"
NAMES = ("slow", "thready", "colorsys", "wave", "mine", OURS)
SAY = f"import sys; print(*[name for name in {NAMES} if name in sys.modules])"


def modules(folder: Path, **sources: str) -> str:
    """Write modules and return the PYTHONPATH for them."""
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def result(stage: Stage, peer: Peer, attempt: int, rank: int = 0) -> tuple[bool, str, list[str]]:
    """Was it forked, why not, and what did it print?"""
    stage.until(lambda: peer.of(m.Exit, attempt=attempt, rank=rank))
    (launched,) = peer.of(m.Launched, attempt=attempt)
    return launched.warm, launched.reason, stage.log(attempt, rank).split()


def test_preloaded_modules_are_there_in_the_rank(tmp_path: Path) -> None:
    path = modules(tmp_path / "lib", slow=SLOW.format(0.2), broken="raise RuntimeError('not here')")
    with Stage(tmp_path / "run", preload=["slow", "broken", "no.such.module"]) as stage:
        stage.script(SAY)
        peer = stage.join(PYTHONPATH=path)
        (warm,) = peer.of(m.Warm)
        assert warm.warm
        assert warm.seconds >= 0.2
        stage.launch(peer, 1)
        assert result(stage, peer, 1) == (True, "", ["slow"])
        log = (stage.run_dir / "logs" / "agent-node1.log").read_text()
        assert "not preloaded: broken: RuntimeError: not here" in log
        assert "not preloaded: no.such.module: ModuleNotFoundError" in log


def test_a_launch_waits_for_the_preload_or_starts_cold_as_told(tmp_path: Path) -> None:
    path = modules(tmp_path / "lib", slow=SLOW.format(1.5))
    with Stage(tmp_path / "run", preload=["slow"]) as stage:
        stage.script(SAY)
        peer = stage.join(warm=False, PYTHONPATH=path)
        stage.launch(peer, 1, wait_warm=False)
        assert result(stage, peer, 1) == (False, "it is still importing", [])
        assert not peer.of(m.Warm)
        peer.send(m.Kill(1))
        stage.launch(peer, 2)
        assert result(stage, peer, 2) == (True, "", ["slow"])


def test_a_preload_that_starts_a_thread_means_cold_starts_with_the_reason(tmp_path: Path) -> None:
    path = modules(tmp_path / "lib", thready=THREAD)
    with Stage(tmp_path / "run", preload=["thready"]) as stage:
        stage.script(SAY)
        peer = stage.join(PYTHONPATH=path)
        why = "importing thready started a thread, which a forked rank would not have"
        assert [(warm.warm, warm.usable, warm.reason) for warm in peer.of(m.Warm)] == [(False, True, why)]
        stage.launch(peer, 1, 2)
        assert result(stage, peer, 1, 0) == (False, why, [])
        assert result(stage, peer, 1, 1) == (False, why, [])


def test_an_accelerator_that_was_touched_forbids_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: torch's own word for it, and an open device, as the kernel would show it."""
    monkeypatch.setattr(os, "listdir", lambda _: ["7"])  # one thread, one open file, whatever else this process does
    monkeypatch.setattr(os, "readlink", lambda _: "/dev/null")
    assert forkable.why_not_fork() == ""
    touched = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", touched)
    assert forkable.why_not_fork().startswith("initialised CUDA")
    touched.cuda.is_initialized = lambda: False
    assert forkable.why_not_fork() == ""
    monkeypatch.setattr(os, "readlink", lambda _: "/dev/nvidiactl")
    assert forkable.why_not_fork().startswith("opened the accelerator /dev/nvidiactl")


def test_a_learned_module_that_starts_a_thread_is_never_learned_again(tmp_path: Path) -> None:
    """What the user did not name must not cost the warm start; installed packages only, so it is put where those are."""
    site = tmp_path / "site-packages"
    path = modules(site, thready=THREAD)
    with Stage(tmp_path / "run") as stage:
        stage.script(SAY)
        (stage.run_dir / "preload.json").write_text(json.dumps({"v": 1, "modules": ["colorsys", "thready", "wave"]}))
        peer = stage.join(PYTHONPATH=path)
        assert [(warm.warm, warm.usable) for warm in peer.of(m.Warm)][-1] == (True, True)
        stage.launch(peer, 1)
        assert result(stage, peer, 1) == (True, "", ["colorsys", "wave"])
        assert "will not preload thready again" in (stage.run_dir / "logs" / "agent-node1.log").read_text()


def test_a_learned_module_that_kills_the_launcher_is_dropped(tmp_path: Path) -> None:
    path = modules(tmp_path / "site-packages", deadly="import os; os._exit(3)")
    with Stage(tmp_path / "run") as stage:
        stage.script(SAY)
        (stage.run_dir / "preload.json").write_text(json.dumps({"v": 1, "modules": ["colorsys", "deadly"]}))
        peer = stage.join(PYTHONPATH=path)
        stage.until(lambda: peer.of(m.Warm, warm=True))


def test_a_preload_that_kills_the_launcher_each_time_ends_in_cold_starts(tmp_path: Path) -> None:
    path = modules(tmp_path / "lib", deadly="import os; os._exit(3)")
    with Stage(tmp_path / "run", preload=["deadly"]) as stage:
        stage.script(SAY)
        peer = stage.join(PYTHONPATH=path)
        assert "died 3 times" in peer.of(m.Warm, usable=True)[0].reason
        stage.launch(peer, 1)
        warm, reason, _ = result(stage, peer, 1)
        assert not warm
        assert "died 3 times" in reason


def test_a_preloaded_source_that_was_edited_is_not_forked(tmp_path: Path) -> None:
    path = modules(tmp_path / "lib", mine="x = 1\n")
    with Stage(tmp_path / "run", preload=["mine"]) as stage:
        stage.script("import mine; print(mine.x)")
        peer = stage.join(PYTHONPATH=path)
        stage.launch(peer, 1)
        assert result(stage, peer, 1) == (True, "", ["1"])
        modules(tmp_path / "lib", mine="x = 'edited'\n")
        stage.launch(peer, 2)
        warm, reason, words = result(stage, peer, 2)
        assert (warm, words) == (False, ["edited"])
        assert "mine.py was edited since it was preloaded" in reason


def test_variables_that_are_read_at_the_start_of_a_process_mean_a_cold_start(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("import sys; print(sys.flags.hash_randomization, sys.flags.utf8_mode)")
        peer = stage.join()
        stage.launch(peer, 1, env={"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"})
        warm, reason, words = result(stage, peer, 1)
        assert (warm, words) == (False, ["0", "1"])
        assert reason.startswith("PYTHONHASHSEED is read once")


def test_other_flags_of_the_interpreter_mean_a_cold_start(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script("print(__debug__)")
        peer = stage.join()
        stage.launch(peer, 1, argv=[sys.executable, "-O", "train.py"])
        warm, reason, words = result(stage, peer, 1)
        assert (warm, words) == (False, ["False"])
        assert "other flags" in reason


def test_the_next_launcher_has_what_the_last_ranks_imported(tmp_path: Path) -> None:
    path = modules(tmp_path / "lib", mine="")
    with Stage(tmp_path / "run") as stage:
        stage.script(
            SAY + "\nimport colorsys, wave, mine, os, time, importlib.util\n"
            "assert importlib.util.find_spec('chunk') or importlib.util.find_spec('cmd')\n"
            "from slurm_resilience.progress.page import PageWriter\n"
            "page = PageWriter(os.environ['RESILIENCE_PAGE'])\n"
            "for step in range(1, 10**9): page.beat(step); time.sleep(0.01)\n"
        )
        peer = stage.join(PYTHONPATH=path)
        stage.launch(peer, 1, 2)
        (rank, other) = stage.started(peer, 1)
        stage.until(lambda: "took over" in (stage.run_dir / "logs" / "agent-node1.log").read_text(), what="a renewed launcher")
        launchers = {process.pid for process in descendants(stage.agents[0].pid)} - {rank.pid, other.pid}
        assert len(launchers) == 3, "the agent, the old launcher with its ranks, and the new one"
        os.kill(rank.pid, signal.SIGKILL)  # is still seen, through the old one
        assert stage.until(lambda: peer.of(m.Exit))[0].signal == "SIGKILL"
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped))
        stage.launch(peer, 2, 2)
        stage.started(peer, 2)
        stage.until(lambda: stage.log(2))
        assert stage.log(2).split() == ["colorsys", "wave", OURS], "and not the user's own module, which may be edited"
        learned = json.loads((stage.run_dir / "preload.json").read_text())["modules"]
        assert {"colorsys", "wave"} <= set(learned)
        assert not {"chunk", "cmd"} & set(learned), "what was only looked for"
        stage.until(lambda: len(descendants(stage.agents[0].pid)) == 4, what="the old launcher ends with its ranks")


def test_a_store_without_torch_is_refused_with_the_reason(tmp_path: Path) -> None:
    """The rank's interpreter has no torch: -I -S hides it."""
    with Stage(tmp_path, argv=[sys.executable, "-I", "-S", "train.py"]) as stage:
        stage.script(SAY)
        peer = stage.join()
        peer.send(m.Store(1))
        failed = stage.until(lambda: peer.of(m.StoreFailed))[0]
        assert failed.attempt == 1
        stage.launch(peer, 1, store_hosted=False)
        assert result(stage, peer, 1) == (True, "", [])


def test_a_launcher_that_is_stuck_cannot_block_a_stop(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(SAY)
        peer = stage.join()
        (launcher,) = [process for process in descendants(stage.agents[0].pid) if process.pid != peer.hello.pid]
        os.kill(launcher.pid, signal.SIGSTOP)
        stage.launch(peer, 1)
        time.sleep(0.2)
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped))
        stage.until(lambda: peer.of(m.Warm, usable=False) and peer.of(m.Warm)[-1].warm)
        stage.launch(peer, 2)
        assert result(stage, peer, 2)[0]
