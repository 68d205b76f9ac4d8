"""Ranks do not start on GPUs that still hold memory of dead ones.  The stand-in for nvidia-smi answers from a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurm_resilience.runtime import accelerator_memory
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.loop import Loop
from tests.unit.runtime.agent_stage import Stage

SLEEPER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """What the stand-in prints; a file ``fails`` beside it makes it fail."""
    (tmp_path / "bin").mkdir()
    tool, answer = tmp_path / "bin" / "nvidia-smi", tmp_path / "held"
    tool.write_text(
        '#!/bin/bash\nhere=$(dirname "$(dirname "$0")")\n'
        '[ "$*" = "--query-compute-apps=pid --format=csv,noheader" ] || exit 9\n'
        'echo asked >> "$here/asked"\n'
        '[ -e "$here/fails" ] && { echo "Unable to determine the device handle"; exit 15; }\ncat "$here/held"\n'
    )
    tool.chmod(0o755)
    answer.touch()
    return answer


def stage_of(held: Path) -> tuple[Path, dict[str, str]]:
    return held.parent / "run", {"PATH": f"{held.parent / 'bin'}:{os.environ['PATH']}"}


def test_a_launch_waits_for_memory_that_a_dead_rank_holds(held: Path) -> None:
    run_dir, environment = stage_of(held)
    with Stage(run_dir) as stage:
        stage.script(SLEEPER)
        peer = stage.join(**environment)
        stage.launch(peer, 1)
        (rank,) = stage.started(peer, 1)
        held.write_text(f"1\n{rank.pid}\n")
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped, attempt=1), what="the stop is told at once")
        stage.launch(peer, 2)
        asked = held.parent / "asked"
        stage.until(lambda: asked.exists() and len(asked.read_text().split()) >= 3, what="it is asked again and again")
        assert not peer.of(m.Launched, attempt=2)
        held.write_text("1\n")  # a stranger's
        stage.started(peer, 2)


@pytest.mark.parametrize("kind", ["fails", "odd", "nothing to wait for"])
def test_what_is_not_known_or_not_so_holds_nobody_up(held: Path, kind: str) -> None:
    run_dir, environment = stage_of(held)
    if kind == "fails":
        (held.parent / "fails").touch()
    held.write_text("[N/A]\n" if kind == "odd" else "1\n")
    with Stage(run_dir) as stage:
        stage.script(SLEEPER)
        peer = stage.join(**environment)
        stage.launch(peer, 1)
        stage.started(peer, 1)
        peer.send(m.Kill(1))
        stage.launch(peer, 2)
        stage.started(peer, 2)
        assert len((held.parent / "asked").read_text().split()) == 1
        said = "".join(log.read_text() for log in run_dir.glob("logs/**/*.log"))
        assert ("whether GPU memory is free again is not known" in said) == (kind != "nothing to wait for")


def test_the_wait_has_an_end(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{held.parent / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(accelerator_memory, "MOST_S", 0.3)
    held.write_text("77\n78\n")
    loop, said, over = Loop(), list[str](), list[bool]()
    wait = accelerator_memory.MemoryWait(loop, said.append, lambda: over.append(wait.over))
    wait.begin({77, 79})
    deadline = time.monotonic() + 60
    while not over and time.monotonic() < deadline:
        assert not wait.over
        loop.turn(0.02)
        wait.tick(time.monotonic())
    assert over == [True]
    assert "still holds memory of 77, which ended" in said[0]
