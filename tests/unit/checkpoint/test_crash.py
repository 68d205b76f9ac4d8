"""No kill and no power loss, at any system call of a real two-rank save, yields a checkpoint that counts and is not whole,
or loses one that was committed.  The program under test is not patched: strace kills it, or records what it asked for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience.checkpoint.dcp import load, save
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import verify
from slurm_resilience.errors import CheckpointError
from tests.unit.checkpoint import strace, worlds

pytestmark = pytest.mark.skipif(bool(strace.why_not()), reason=strace.why_not() or "-")

FIRST, SECOND, THIRD = 1, 2, 3


def _state(rank: int, step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(step)), f"part{rank}": torch.full((7,), float(step))}, "step": step}


def _prepare(rank: int, world: int, root: str) -> None:
    store = CheckpointStore.open(root, attempt=1)
    if rank == 0:
        store.fence()
    save(store, _state(rank, FIRST), step=FIRST)


def _save_when_told(rank: int, world: int, root: str, pipes: str, keep_last: int, locks: bool) -> str:
    """Ready, wait, save; "saved" when the save returned.  What it does before and after is not in the trace."""
    strace.allow_tracing()
    store = CheckpointStore.open(root, attempt=1, retention=Retention(keep_last=keep_last))
    if not locks:
        _without_locks(store)
    state = _state(rank, SECOND)
    go = os.open(f"{pipes}/go{rank}", os.O_RDWR)
    Path(f"{pipes}/ready{rank}").write_text(str(os.getpid()))
    os.read(go, 1)
    try:
        save(store, state, step=SECOND)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "root"
    worlds.run(2, _prepare, str(root))
    return root


class Ranks:
    """Two ranks that have come to the brink of their save."""

    def __init__(self, root: Path, pipes: Path, keep_last: int, *, locks: bool = True) -> None:
        pipes.mkdir()
        self._pipes = pipes
        for rank in (0, 1):
            os.mkfifo(pipes / f"go{rank}")
        given = (str(root), str(pipes), keep_last, locks)
        self.ranks: list[tuple[Any, Connection]] = worlds.start(2, _save_when_told, *given, timeout_s=100)
        self.pids = [self._pid(rank) for rank in (0, 1)]

    def _pid(self, rank: int) -> int:
        path = self._pipes / f"ready{rank}"
        worlds.wait_until(lambda: path.exists() and path.read_text() != "", 120, f"rank {rank} is not ready")
        return int(path.read_text())

    def go(self) -> list[Any]:
        self.release()
        return self.results()

    def release(self) -> None:
        for rank in (0, 1):
            fd = os.open(self._pipes / f"go{rank}", os.O_RDWR)
            os.write(fd, b"!")
            os.close(fd)

    def results(self) -> list[Any]:
        return worlds.collect(self.ranks, within_s=240)


def check(root: Path, *, committed: bool, attempt: int = 2) -> int:
    """What must hold after any crash; returns the step of the latest."""
    reader = CheckpointStore.open(root)
    seen = reader.latest()
    store = CheckpointStore.open(root, attempt=attempt)
    store.fence()
    latest = store.latest()
    assert latest is not None, "no latest"
    assert latest.step in (FIRST, SECOND, THIRD)
    assert seen is not None
    assert seen.step in (FIRST, SECOND, THIRD)
    if committed:
        assert latest.step == SECOND, "a committed checkpoint was lost"
        assert seen.step == SECOND, "a reader without an attempt misses a committed checkpoint"
    for entry in store.entries():
        if entry.usable:
            assert verify(store.path(entry), entry) == []
    target = {"model": {"w": torch.zeros(50), "part0": torch.zeros(7), "part1": torch.zeros(7)}, "step": 0}
    result = load(store, latest, target)
    assert result.entry.step == latest.step == target["step"]
    for value in target["model"].values():  # type: ignore[attr-defined]
        assert bool((value == latest.step).all())
    return latest.step


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long, id="every call"), pytest.param(13, id="some calls")])
def test_a_kill_at_any_call_loses_nothing(template: Path, tmp_path: Path, victim: int, every: int) -> None:
    number, outcomes = 1, {FIRST: 0, SECOND: 0}
    while True:
        base = tmp_path / str(number)
        base.mkdir()
        root = base / "root"
        shutil.copytree(template, root)
        ranks = Ranks(root, base / "pipes", keep_last=1 + number % 2)
        inject = f"inject={strace.CHANGES}:signal=KILL:when={number}"
        tracer = strace.Tracer(ranks.pids[victim], "-e", f"trace={strace.CHANGES}", "-e", inject, "-o", "/dev/null")
        results = ranks.go()
        tracer.stop()
        killed = isinstance(results[victim], worlds.Killed)
        outcomes[check(root, committed="saved" in results)] += 1
        shutil.rmtree(base)
        if not killed:
            break
        number += every if every == 1 or number > 1 else every // 3 + victim
    assert number > (20 if victim == 0 else 4), f"only {number} calls: the tracer did not see the save"
    assert outcomes[FIRST] > 0
    assert outcomes[SECOND] > 0


@pytest.mark.parametrize("locks", ["locks work", "locks exclude nobody"])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long, id="every call"), pytest.param(17, id="some calls")])
def test_an_attempt_frozen_at_any_call_is_fenced_when_it_thaws(template: Path, tmp_path: Path, every: int, locks: str) -> None:
    """Two attempts alive at once: the old one is stopped in mid-save, the new one opens the root, the old one goes on."""
    number, fenced = 1, 0
    while True:
        base = tmp_path / str(number)
        base.mkdir()
        root = base / "root"
        shutil.copytree(template, root)
        ranks = Ranks(root, base / "pipes", keep_last=2, locks=locks == "locks work")
        inject = f"inject={strace.CHANGES}:signal=STOP:when={number}"
        tracer = strace.Tracer(ranks.pids[0], "-e", f"trace={strace.CHANGES}", "-e", inject, "-o", "/dev/null")
        ranks.release()
        frozen = strace.wait_for_stop(ranks.pids[0], unless=functools.partial(ranks.ranks[0][1].poll, 0))
        new = CheckpointStore.open(root, attempt=2)
        if locks != "locks work":
            _without_locks(new)
        new.fence()
        known = {entry.name for entry in new.entries() if entry.usable}
        mine = _commit_third(new)
        if frozen:
            worlds.wait_until(functools.partial(_thaw, ranks), 60, "it stays frozen")
        old = ranks.results()
        tracer.stop()
        after = {entry.name for entry in new.entries() if entry.usable}
        assert after == known | {mine}, f"frozen at call {number}: {old}"
        latest = CheckpointStore.open(root).latest()
        assert latest is not None
        assert latest.name == mine
        assert check(root, committed=False, attempt=3) == THIRD
        fenced += any("owns it now" in str(result) for result in old)
        shutil.rmtree(base)
        if not frozen:
            break
        number += every
    assert number > 20
    assert fenced > 0


def _thaw(ranks: Ranks) -> bool:
    """Let rank 0 go on; whether it has come to an end.  Called again and again: on a busy machine the tracer's own stop can
    look like the freeze, which then comes later."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks.pids[0], signal.SIGCONT)
    return ranks.ranks[0][1].poll(0.02)


def _commit_third(store: CheckpointStore) -> str:
    target = {"model": {"w": torch.zeros(50), "part0": torch.zeros(7), "part1": torch.zeros(7)}, "step": THIRD}
    for value in target["model"].values():  # type: ignore[attr-defined]
        value.fill_(THIRD)
    return save(store, target, step=THIRD).name


def _without_locks(store: CheckpointStore) -> None:
    store._lock.held = lambda: contextlib.nullcontext(False)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def recorded(template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[strace.Call], Path, Path]:
    base = tmp_path_factory.mktemp("recorded")
    root = base / "root"
    shutil.copytree(template, root)
    ranks = Ranks(root, base / "pipes", keep_last=1)
    (base / "log").mkdir()
    options = ["-ff", "-ttt", "-xx", "-s", "10000000", "-e", f"trace={strace.CALLS}", "-o", str(base / "log" / "trace")]
    tracers = [strace.Tracer(pid, *options) for pid in ranks.pids]
    assert ranks.go() == ["saved", "saved"]
    for tracer in tracers:
        tracer.stop()
    return strace.read(base / "log"), root, base


def test_a_power_loss_at_any_call_loses_nothing(
    recorded: tuple[list[strace.Call], Path, Path], template: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    calls, root, _ = recorded
    disk = strace.Disk(template)
    disk.prefix = os.fsencode(root)
    dice = random.Random(7)
    keeps = [strace.Keep(), strace.KeepNames(), strace.KeepZeros(), strace.KeepAll()]
    keeps += [strace.KeepSome(dice)] * (6 if request.config.getoption("--long") else 1)
    changes, outcomes = 0, {FIRST: 0, SECOND: 0}
    returned = _returned(calls, root)
    for call in calls:
        if not disk.apply(call):
            continue
        changes += 1
        for number, keep in enumerate(keeps):
            where = tmp_path / f"{changes}-{number}"
            disk.after_power_loss(where, keep)
            try:
                outcomes[check(where, committed=call.at >= returned)] += 1
            except Exception as error:
                what = f"power lost after change {changes} ({call.name}), {type(keep).__name__}, left in {where}"
                raise AssertionError(f"{what}: {error}") from error
            shutil.rmtree(where)
    assert changes > 20
    assert outcomes[FIRST] > 0
    assert outcomes[SECOND] > 0


def _returned(calls: list[strace.Call], root: Path) -> float:
    """When the save was committed at the latest: rank 0's line in the history, its last act before it returns."""
    history = os.fsencode(root / "history.jsonl")
    lines = [call for call in calls if call.name == "write" and b'"op": "commit"' in strace.strings(call.arguments)[0]]
    assert len(lines) == 1, history
    assert json.loads(strace.strings(lines[0].arguments)[0])["entry"]["step"] == SECOND
    return lines[0].at


def test_the_disk_model_loses_what_was_not_fsynced(tmp_path: Path) -> None:
    """The model itself: without the fsyncs of a save, a power loss does lose it."""
    root = tmp_path / "root"
    (root / "kept").mkdir(parents=True)
    disk = strace.Disk(root)
    prefix = os.fspath(root)

    def call(name: str, text: str, result: int = 0) -> None:
        raw = "".join(f"\\x{byte:02x}" for byte in f"{prefix}/{text}".encode())
        arguments = {"openat": f'AT_FDCWD, "{raw}", O_WRONLY|O_CREAT', "mkdir": f'"{raw}", 0755'}[name]
        assert disk.apply(strace.Call(0.0, 1, name, arguments, result))

    call("mkdir", "new")
    call("openat", "new/file", 5)
    disk.apply(strace.Call(0.0, 1, "write", '5, "\\x61\\x62", 2', 2))
    for number, (keep, left) in enumerate(
        [(strace.Keep(), None), (strace.KeepNames(), b""), (strace.KeepZeros(), b"\0\0"), (strace.KeepAll(), b"ab")]
    ):
        where = tmp_path / f"left{number}"
        disk.after_power_loss(where, keep)
        assert ((where / "new" / "file").read_bytes() if left is not None else None) == left
        assert (where / "new").exists() is (left is not None)
    disk.apply(strace.Call(0.0, 1, "fsync", "5", 0))
    disk.after_power_loss(tmp_path / "synced", strace.KeepNames())
    assert (tmp_path / "synced" / "new" / "file").read_bytes() == b"ab"
