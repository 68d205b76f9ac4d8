"""Checkpoints behind training and copies in memory, with real ranks that die, are preempted, or find no room."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.manifest import read_manifest
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import verify
from slurm_resilience.progress.page import Phase

from . import programs
from .worlds import RankError, Started, run_world, start

BEHIND: dict[str, Any] = {"checkpoint": {"every_steps": 3, "every_min": None, "keep_last": 9}}
FOREVER = 100_000


def entries(run_dir: Path) -> list[Entry]:
    return CheckpointStore.open(run_dir / "checkpoints").entries()


def all_whole(run_dir: Path) -> bool:
    store = CheckpointStore.open(run_dir / "checkpoints")
    return all(entry.usable and not verify(store.path(entry), entry) for entry in store.entries())


def saves(started: Started, kind: str) -> list[int]:
    return [fact["fields"]["step"] for fact in started.of(f"checkpoint_{kind}")]


def is_held(hold: Path) -> bool:
    return Path(f"{hold}.held").exists()


def with_copies(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "checkpoint": {"every_steps": 5, "every_min": None, "local_every_steps": 1, "local_dir": str(tmp_path / "mem"), **more}
    }


# -- behind training --------------------------------------------------------------------------------------------------


def test_training_goes_on_behind_a_save_and_a_rank_killed_then_leaves_nothing_wrong(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    started = start(2, programs.train_held, FOREVER, str(hold), 0.02, run_dir=tmp_path, settings=BEHIND)
    started.until(lambda: 3 in saves(started, "committed"))
    hold.touch()
    started.until(lambda: is_held(hold) and len(saves(started, "started")) > len(saves(started, "committed")))
    held = saves(started, "started")[-1]
    started.until(lambda: all(one.step >= held + 2 for one in started.progress()))  # the third step would begin another save
    assert saves(started, "committed")[-1] == held - 3
    started.kill(1)
    hold.unlink()
    with pytest.raises(RankError):
        started.results()
    assert saves(started, "committed")[-1] == held - 3
    assert entries(tmp_path)[0].step == held - 3
    assert all_whole(tmp_path)
    again = start(2, programs.train, held + 4, run_dir=tmp_path, attempt=2, settings=BEHIND)
    results = again.results()
    assert [one["start"] for one in results] == [held - 3] * 2
    assert saves(again, "committed") == [held, held + 3, held + 4]
    whole = run_world(2, programs.train, held + 4, run_dir=tmp_path / "undisturbed", settings=BEHIND)
    assert results[0]["weights"] == whole[0]["weights"]
    assert all_whole(tmp_path)


def test_a_commit_is_told_when_it_comes_with_the_seconds_that_training_stood(tmp_path: Path) -> None:
    started = start(2, programs.train_slow_disk, 9, 0.6, run_dir=tmp_path, settings=BEHIND)
    started.results()
    facts = {fact["fields"]["step"]: fact["fields"] for fact in started.of("checkpoint_committed")}
    assert list(facts) == [3, 6, 9]
    assert all(fields["seconds"] >= 0.6 for fields in facts.values())
    for behind in (3, 6):
        assert facts[behind]["stall_s"] < facts[behind]["seconds"]
    assert facts[9]["stall_s"] == facts[9]["seconds"]  # the last one is waited for


@pytest.mark.parametrize("background", [True, False])
def test_saves_change_nothing_of_the_training_also_at_step_0_and_with_gradients(tmp_path: Path, background: bool) -> None:
    """A checkpoint at step 0, or one with gradients present, changed the later steps elsewhere (Megatron-LM#5976)."""
    often = {"checkpoint": {"every_steps": 1, "every_min": None, "background": background}}
    never = {"checkpoint": {"every_min": None}}
    (saved,) = run_world(1, programs.train_saving_at_0, 6, run_dir=tmp_path / "saved", settings=often)
    (whole,) = run_world(1, programs.train_dropout, 6, run_dir=tmp_path / "whole", settings=never)
    for name in ("loss", "drawn", "weights"):
        assert saved[name] == whole[name], name


# -- asked to end while one is in flight ------------------------------------------------------------------------------


def stop_in_flight(tmp_path: Path, remaining_s: float, cost_s: float, left_s: float) -> tuple[Started, int, int]:
    """Ask for the end while the second save is held back; the step of that save, and the one at which all ended."""
    hold = tmp_path / "hold"
    started = start(2, programs.train_held_with_costs, FOREVER, str(hold), remaining_s, cost_s, run_dir=tmp_path, settings={
        "checkpoint": {"every_min": None, "keep_last": 9}})  # fmt: skip
    started.until(lambda: all(one.step >= 1 for one in started.progress()))
    for number in (1, 2):
        started.pages[0].order(save=number)
        started.until(lambda n=number: len(saves(started, "started")) == n)
        if number == 1:
            started.until(lambda: len(saves(started, "committed")) == 1)
            hold.touch()
    flying = saves(started, "started")[1]
    started.until(lambda: all(one.step >= flying + 2 for one in started.progress()))
    for page in started.pages:
        page.order(stop=True, save=2, cause="preemption", deadline=time.time() + left_s)
    started.until(lambda: all(one.phase == Phase.CHECKPOINT for one in started.progress()))  # they wait for the one in flight
    assert saves(started, "committed")[1:] == []
    hold.unlink()
    (step,) = {one["step"] for one in started.results()}
    return started, flying, step


def test_with_time_for_both_the_one_in_flight_is_waited_for_and_replaced(tmp_path: Path) -> None:
    started, flying, step = stop_in_flight(tmp_path, remaining_s=10, cost_s=300, left_s=1000)
    assert saves(started, "committed")[1:] == [flying, step]
    assert [fact["fields"]["saved"] for fact in started.of("stopped")] == [True, True]
    assert entries(tmp_path)[0].step == step > flying
    assert all_whole(tmp_path)


def test_with_time_for_one_the_one_in_flight_is_waited_for(tmp_path: Path) -> None:
    started, flying, step = stop_in_flight(tmp_path, remaining_s=10, cost_s=3000, left_s=1000)
    assert step > flying
    assert saves(started, "committed")[1:] == [flying]
    assert [fact["fields"]["saved"] for fact in started.of("stopped")] == [False, False]
    (failed,) = started.of("checkpoint_failed")
    assert f"that of step {flying} was waited for" in failed["fields"]["error"]
    assert entries(tmp_path)[0].step == flying


# -- copies in the nodes' memory ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    """A run that was killed at some step after its shared checkpoint of step 5, and how it would have gone on."""
    base = tmp_path_factory.mktemp("killed")
    hold = base / "hold"
    started = start(2, programs.train_held, FOREVER, str(hold), 0.02, run_dir=base / "run", settings=with_copies(base))
    started.until(lambda: 5 in saves(started, "committed"))
    hold.touch()  # no shared checkpoint after this one
    started.until(lambda: is_held(hold))
    shared = max(saves(started, "committed"))
    started.until(lambda: all(one.step >= shared + 3 for one in started.progress()))
    started.kill(1)
    with pytest.raises(RankError):
        started.results()
    whole = run_world(2, programs.train, shared + 8, run_dir=base / "whole", settings={"checkpoint": {"every_min": None}})
    return base, shared, whole[0]


def relaunch(killed: tuple[Path, int, dict[str, Any]], tmp_path: Path, world: int = 2, harm: Any = None) -> Started:
    base, shared, _ = killed
    shutil.copytree(base / "run", tmp_path / "run")
    shutil.copytree(base / "mem", tmp_path / "mem")
    if harm is not None:
        harm(tmp_path / "mem" / "test")
    started = start(world, programs.train, shared + 8, run_dir=tmp_path / "run", attempt=2, settings=with_copies(tmp_path))
    return started


def test_ranks_that_died_on_living_nodes_go_on_from_memory(killed: tuple[Path, int, dict[str, Any]], tmp_path: Path) -> None:
    _, shared, whole = killed
    started = relaunch(killed, tmp_path)
    results = started.results()
    (step,) = {one["start"] for one in results}
    assert step > shared
    assert {one["tier"] for one in results} == {"local"}
    assert {one["rng"] for one in results} == {"exact"}
    assert {fact["fields"]["tier"] for fact in started.of("resumed")} == {"local"}
    assert results[0]["weights"] == whole["weights"]
    assert results[0]["loss"] == {at: whole["loss"][at] for at in range(step + 1, shared + 9)}
    assert entries(tmp_path / "run")[0].step == shared + 8
    assert not (tmp_path / "mem").exists(), "copies are left behind after the end"


def flip(copies: Path) -> None:
    """One bit of a weight in each copy of rank 1."""
    for copy in (copies / "rank00001-of-00002").glob("step-*"):
        item = next(one for one in read_manifest(copy).items if one.key == "model.3.weight")
        raw = bytearray((copy / item.file).read_bytes())
        raw[item.data_offset + item.data_length // 2] ^= 1
        (copy / item.file).write_bytes(raw)


def lose_a_node(copies: Path) -> None:
    shutil.rmtree(copies / "rank00001-of-00002")


@pytest.mark.parametrize(("what", "world"), [("node lost", 2), ("bit flipped", 2), ("another world", 1)])
def test_otherwise_they_go_on_from_the_shared_one(
    killed: tuple[Path, int, dict[str, Any]], tmp_path: Path, what: str, world: int
) -> None:
    _, shared, whole = killed
    started = relaunch(killed, tmp_path, world, {"node lost": lose_a_node, "bit flipped": flip}.get(what))
    results = started.results()
    assert [one["start"] for one in results] == [shared] * world
    assert {one["tier"] for one in results} == {"shared"}
    assert len(started.of("local_copy_failed")) == (world if what == "bit flipped" else 0)
    if world == 2:
        assert results[0]["weights"] == whole["weights"]


def test_a_copy_of_the_last_step_becomes_the_last_checkpoint(killed: tuple[Path, int, dict[str, Any]], tmp_path: Path) -> None:
    base, _, _ = killed
    for part in ("run", "mem"):
        shutil.copytree(base / part, tmp_path / part)
    newest = [
        {names.parse(path.name).step for path in (base / "mem" / "test" / f"rank{rank:05d}-of-00002").glob("step-*")}  # type: ignore[union-attr]
        for rank in range(2)
    ]
    last = max(set.intersection(*newest))
    results = run_world(2, programs.train, last, run_dir=tmp_path / "run", attempt=2, settings=with_copies(tmp_path))
    assert {one["outcome"] for one in results} == {"already_complete"}
    assert entries(tmp_path / "run")[0].step == last


def test_a_node_without_room_for_copies_keeps_none_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "mem").write_text("a file in the way")
    started = start(2, programs.train, 4, run_dir=tmp_path / "run", settings=with_copies(tmp_path))
    assert {one["step"] for one in started.results()} == {4}
    (failed,) = started.of("local_copy_failed")
    assert "opening the local copies failed" in failed["fields"]["error"]


# -- no room ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0755", "tmpfs", where], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_disk_that_fills_up_in_the_middle_of_a_save_costs_that_save(tmp_path: Path, small_disk: Path) -> None:
    hold, filler = tmp_path / "hold", small_disk / "filler"
    settings = {"checkpoint": {**BEHIND["checkpoint"], "keep_last": 2, "dir": str(small_disk / "checkpoints")}}
    started = start(2, programs.train_held, FOREVER, str(hold), 0.05, run_dir=tmp_path / "run", settings=settings)
    started.until(lambda: len(saves(started, "committed")) >= 1)
    hold.touch()
    started.until(lambda: is_held(hold) and len(saves(started, "started")) > len(saves(started, "committed")))
    held, good = saves(started, "started")[-1], len(saves(started, "committed"))
    started.until(lambda: all(one.step > held for one in started.progress()))  # it found room, and waits to be written
    file = os.open(filler, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    hold.unlink()
    started.until(lambda: len(saves(started, "failed")) >= 1)
    filler.unlink()
    started.until(lambda: len(saves(started, "committed")) > good)
    for page in started.pages:
        page.order(stop=True, cause="cancelled")
    (step,) = {one["step"] for one in started.results()}
    failed = started.of("checkpoint_failed")
    assert failed[0]["fields"]["step"] == held
    assert "No space left" in failed[0]["fields"]["error"]
    committed = saves(started, "committed")
    assert held not in committed
    assert len(committed) > good
    assert committed[-1] == step
    store = CheckpointStore.open(small_disk / "checkpoints")
    assert [entry.step for entry in reversed(store.entries())] == committed[-2:]
    assert all(not verify(store.path(entry), entry) for entry in store.entries())


# -- the end of the interpreter -------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from slurm_resilience import Run
import slurm_resilience.checkpoint.dcp.saving as module
from tests.unit.training.programs import make_model
import torch
write = module.write_shard
def slow(*args):
    time.sleep(0.7)
    if sys.argv[2] == "fails":
        raise OSError(28, "No space left on device")
    return write(*args)
module.write_shard = slow
run = Run(folder=sys.argv[1], checkpoint={"every_steps": 2, "every_min": None})
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=optimizer)
run.resume()
for step in run.steps(100):
    optimizer.step()
    if step == 2:
        break
print("left", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 0), pytest.param("fails", 84, marks=pytest.mark.long)])
def test_a_script_that_leaves_with_a_save_in_flight_does_not_lose_it_in_silence(tmp_path: Path, how: str, code: int) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), how], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.stdout == "left\n", done.stderr
    assert done.returncode == code, done.stderr
    assert [entry.step for entry in entries(tmp_path / "run")] == ([] if how == "fails" else [2])
    assert ("the last checkpoint failed" in done.stderr) == (how == "fails")


# -- what the settings ask for --------------------------------------------------------------------------------------------


def test_the_best_by_a_reported_metric_stays_and_auto_gives_its_reason(tmp_path: Path) -> None:
    often = {"every_min": "auto", "auto_bounds_min": [1e-6, 1e-5]}
    settings = {"checkpoint": {**often, "keep_last": 1, "keep_best": "score", "keep_best_is": "highest"}}
    started = start(1, programs.train_scoring, [3.0, 9.0, 1.0, 2.0], run_dir=tmp_path, settings=settings)
    started.results()
    assert sorted(entry.step for entry in entries(tmp_path)) == [2, 4]
    assert {entry.step: entry.metrics["score"] for entry in entries(tmp_path)} == {2: 9.0, 4: 2.0}
    chosen = started.of("checkpoint_interval_chosen")
    assert "not known yet" in chosen[0]["fields"]["reason"]
