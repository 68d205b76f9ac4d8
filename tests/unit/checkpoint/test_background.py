"""Background saves keep what was there when they began, never two at once, and no failure is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import load
from slurm_resilience.checkpoint.dcp.background import BackgroundSaver, Landed, fits
from slurm_resilience.checkpoint.errors import SaveInFlight
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, ExitCode, Fenced
from tests.unit.checkpoint import models, worlds


def _store(root: str, rank: int, attempt: int = 1) -> CheckpointStore:
    store = CheckpointStore.open(root, attempt=attempt)
    if rank == 0:
        store.fence()
    if dist.is_initialized():
        dist.barrier()
    return store


class Gate:
    """Holds every write of a shard back until it is opened, so that a save stays in flight for as long as a test wants."""

    def __init__(self) -> None:
        import slurm_resilience.checkpoint.dcp.saving as module

        self.opened = threading.Event()
        self.reached = threading.Event()
        self._module, self._real = module, module.write_shard
        module.write_shard = self._write  # type: ignore[assignment]

    def _write(self, *args: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(30)
        return self._real(*args)

    def close(self) -> None:
        self.opened.set()
        self._module.write_shard = self._real


def _what_was_there(rank: int, world: int, root: str, kind: str) -> list[list[str]]:
    """Training goes on over the live tensors while the save of the state before is held back."""
    store = _store(root, rank)
    model, optimizer = models.build(kind, world)
    saver = BackgroundSaver(store, timeout_s=100)
    expected, buffers = [], set()
    for step in (1, 2, 3):
        models.train(model, optimizer, 1, seed=step)
        state = models.state(model, optimizer)
        expected.append(models.whole(state))
        gate = Gate()
        saver.start(state, step=step, extra={"samples": [step]})
        assert gate.reached.wait(100)
        assert saver.in_flight == step
        assert saver.poll() is None
        models.train(model, optimizer, 1, seed=100 + step)  # also talks over the default group meanwhile
        dist.barrier()
        gate.close()
        entry = saver.wait(100)
        assert entry is not None
        assert entry.step == step
        buffers.add(saver.staged_bytes)
    assert saver.poll() is None
    assert saver.close() is None
    assert len(buffers) == 1
    found = []
    for want, entry in zip(expected, reversed(store.entries()), strict=True):
        fresh = models.state(*models.build(kind, world, seed=9))
        load(store, entry, fresh)
        found.append(models.differences(want, models.whole(fresh)))
    return found


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_what_was_there_when_it_began_is_what_is_saved(tmp_path: Path, kind: str) -> None:
    """Buffers are reused, and consecutive saves differ (NeMo RL#3312); groups are apart (KempnerForge#104)."""
    assert worlds.run(2, _what_was_there, str(tmp_path), kind) == [[[], [], []]] * 2


def _share(rank: int, world: int, root: str) -> int:
    saver = BackgroundSaver(_store(root, rank), timeout_s=100)
    saver.start({"a": torch.ones(1000), "b": torch.ones(1000)}, step=1)
    saver.wait()
    return saver.staged_bytes


def test_of_replicated_state_each_rank_copies_only_its_share(tmp_path: Path) -> None:
    assert worlds.run(2, _share, str(tmp_path)) == [4000, 4000]


def _second_waits(rank: int, world: int, root: str) -> None:
    store = _store(root, rank)
    saver = BackgroundSaver(store)
    gate = Gate()
    saver.start({"w": torch.ones(4)}, step=1)
    assert gate.reached.wait(100)
    with pytest.raises(SaveInFlight, match="step 1 has not ended"):
        saver.wait(0.05)
    wait = saver.wait

    def open_meanwhile() -> Any:
        threading.Timer(0.3, gate.close).start()
        return wait()

    saver.wait = open_meanwhile  # type: ignore[assignment]
    first = saver.start({"w": torch.ones(4) * 2}, step=2)
    assert saver.stall_s >= 0.3
    assert first is not None
    assert first.step == 1
    second = saver.close()
    assert second is not None
    assert [entry.step for entry in store.entries()] == [2, 1]
    assert second.alarm == ""


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    worlds.run(1, _second_waits, str(tmp_path))


def _stale(rank: int, world: int, root: str) -> list[str]:
    store = _store(root, rank)
    saver = BackgroundSaver(store)
    weights, alarms = torch.ones(4), []
    for step in (1, 2, 3):
        saver.start({"model": {"w": weights}, "probe": torch.zeros(1)}, step=step)
        entry = saver.wait()
        assert entry is not None
        alarms.append(entry.alarm)
        if step == 2:
            weights = weights + 1
    return alarms


def test_parameters_that_do_not_move_between_steps_raise_an_alarm(tmp_path: Path) -> None:
    (alarms,) = worlds.run(1, _stale, str(tmp_path))
    assert alarms == ["", "model unchanged since step 1", ""]


def _failure_is_told(rank: int, world: int, root: str) -> list[str]:
    store = _store(root, rank)
    saver = BackgroundSaver(store, timeout_s=100)
    saver.start({"w": torch.ones(4)}, step=1)
    saver.wait()
    gate = Gate()
    saver.start({"w": torch.ones(4)}, step=2)
    assert gate.reached.wait(100)
    dist.barrier()
    if rank == 0:
        for folder in (store.root / names.writing_dir(1)).iterdir():
            folder.rmdir()
    dist.barrier()
    gate.close()
    said = []
    deadline = time.monotonic() + 100
    while not said and time.monotonic() < deadline:
        try:
            saver.poll()
            time.sleep(0.01)
        except CheckpointError as error:
            said.append(str(error))
    saver.start({"w": torch.ones(4)}, step=3)
    entry = saver.close()
    assert entry is not None
    assert [entry.step for entry in store.entries()] == [3, 1]
    return said


def test_a_failure_is_raised_at_the_next_look_and_the_next_save_works(tmp_path: Path) -> None:
    for said in worlds.run(2, _failure_is_told, str(tmp_path)):
        assert len(said) == 1
        assert "No such file" in said[0]


def _peer_dies(rank: int, world: int, root: str) -> tuple[float, str]:
    store = _store(root, rank)
    saver = BackgroundSaver(store, timeout_s=100)
    gate = Gate()
    saver.start({"w": torch.ones(4)}, step=1)
    assert gate.reached.wait(100)
    if rank == 1:
        os.kill(os.getpid(), 9)
    gate.close()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="lost contact") as caught:
        saver.wait(100)
    assert store.entries() == []
    return time.monotonic() - began, str(caught.value)


def test_a_peer_that_dies_is_seen_within_seconds(tmp_path: Path) -> None:
    """The saving process died and the main one waited for ever (SkyRL#1960)."""
    (seconds, _), dead = worlds.run(2, _peer_dies, str(tmp_path))
    assert seconds < 50  # the group itself gives up after twice as long
    assert isinstance(dead, worlds.Killed)


def _peer_hangs(rank: int, world: int, root: str) -> float:
    store = _store(root, rank)
    saver = BackgroundSaver(store, timeout_s=2)
    gate = Gate()
    saver.start({"w": torch.ones(4)}, step=1)
    assert gate.reached.wait(100)
    began = time.monotonic()
    if rank == 0:
        gate.close()
        with pytest.raises(CheckpointError, match="lost contact"):
            saver.wait(100)
    took = time.monotonic() - began
    dist.barrier()
    gate.close()
    if rank == 1:
        with pytest.raises(CheckpointError):
            saver.wait(100)
    assert store.entries() == []
    return took


def test_a_peer_that_hangs_costs_the_groups_own_time_out(tmp_path: Path) -> None:
    assert 1.5 < worlds.run(2, _peer_hangs, str(tmp_path))[0] < 50


def _fenced(rank: int, world: int, root: str) -> None:
    store = _store(root, rank)
    saver = BackgroundSaver(store)
    gate = Gate()
    saver.start({"w": torch.ones(4)}, step=1)
    assert gate.reached.wait(100)
    _store(root, 0, attempt=2)
    gate.close()
    with pytest.raises(Fenced):
        saver.close()
    assert store.entries() == []


def test_a_save_of_a_leftover_is_fenced(tmp_path: Path) -> None:
    worlds.run(1, _fenced, str(tmp_path))


SCRIPT = """
import sys, threading, torch
from slurm_resilience.checkpoint import store as module
from slurm_resilience.checkpoint.dcp.background import BackgroundSaver
import slurm_resilience.checkpoint.dcp.saving as save
store = module.CheckpointStore.open(sys.argv[1], attempt=1)
store.fence()
late = threading.Event()
real = save.write_shard
def slow(*args):
    late.wait(0.7)
    if sys.argv[2] == "fails":
        raise OSError(28, "No space left on device")
    return real(*args)
save.write_shard = slow
saver = BackgroundSaver(store)
saver.start({"w": torch.ones(4)}, step=1)
if sys.argv[2] == "raises":
    raise SystemExit(3)
if sys.argv[2] == "forks":
    import os
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("how", ["ends", "fails", "raises", "forks"])
def test_a_script_that_ends_waits_for_its_save_or_fails(tmp_path: Path, how: str) -> None:
    """Exit code 0 and no checkpoint is what others do (torchtitan#4270, VeOmni#1162)."""
    code = {"ends": 0, "fails": ExitCode.BAD_CHECKPOINT, "raises": 3, "forks": 0}[how]
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), how], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert [entry.step for entry in CheckpointStore.open(tmp_path).entries()] == ([] if how == "fails" else [1])
    assert ("the last checkpoint failed" in done.stderr) is (how == "fails")
    assert how != "fails" or "No space left" in done.stderr


@pytest.mark.parametrize(
    ("left", "remaining", "cost", "choice"),
    [(100, 10, 20, "save"), (40, 10, 20, "wait"), (12, 10, 20, "stop"), (40, 0, 20, "save"), (20, 0, 20, "stop")],
)
def test_what_fits_into_the_time_left(left: float, remaining: float, cost: float, choice: str) -> None:
    assert fits(left, remaining_s=remaining, cost_s=cost) == choice


def _no_room(rank: int, world: int, root: str) -> tuple[bool, list[Any], int]:
    """Rank 1 says that there is no memory for a copy; then there is, and the layout is the same; then another layout."""
    import slurm_resilience.checkpoint.dcp.background as module

    store = _store(root, rank)
    saver = BackgroundSaver(store, timeout_s=100, ranks_here=2)
    free = 20_000 if rank == 0 else 15_999
    module.memory.available_bytes = lambda: free  # type: ignore[assignment,misc]
    heard: list[Landed] = []
    saver.start({"a": torch.ones(1000), "b": torch.ones(1000)}, step=1, told=heard.append)  # 4000 bytes each rank writes
    behind = saver.in_flight is not None or saver.staged_bytes > 0
    first = saver.wait()
    assert first is not None
    free = 16_000
    saver.start({"a": torch.ones(1000), "b": torch.ones(1000)}, step=2, told=heard.append)
    assert saver.staged_bytes == 0
    free = 15_983
    saver.start({"a": torch.ones(1000), "b": torch.ones(999), "c": torch.ones(1)}, step=3, told=heard.append)
    assert saver.staged_bytes == 0
    free = 15_984
    saver.start({"a": torch.ones(999), "b": torch.ones(999)}, step=4, told=heard.append)
    saver.close()
    stalls = [one.stall_s == one.seconds for one in heard]
    return behind, stalls, len(store.entries())


def test_without_room_for_a_copy_on_one_rank_all_save_in_the_foreground(tmp_path: Path) -> None:
    for behind, stalls, entries in worlds.run(2, _no_room, str(tmp_path)):
        assert not behind
        assert stalls == [True, True, True, False]
        assert entries == 4


def _told_at_once(rank: int, world: int, root: str) -> None:
    saver = BackgroundSaver(_store(root, rank))
    heard: list[Landed] = []
    gate = Gate()
    saver.start({"w": torch.ones(4)}, step=1, told=heard.append)
    assert gate.reached.wait(100)
    assert heard == []
    gate.close()
    worlds.wait_until(lambda: bool(heard), 30, "nobody was told")
    (landed,) = heard
    assert landed.entry is not None
    assert landed.seconds > landed.stall_s
    assert saver.failure is None
    (saver._store.root / names.writing_dir(1)).rmdir()
    with pytest.raises(CheckpointError):
        saver.start({"w": torch.ones(4)}, step=2, told=heard.append)
    assert len(heard) == 1


def test_the_end_of_a_save_is_told_when_it_comes_and_not_when_somebody_asks(tmp_path: Path) -> None:
    worlds.run(1, _told_at_once, str(tmp_path))
