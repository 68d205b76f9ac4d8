"""Local copies are used when every rank has the same newer one, whole; otherwise nobody uses any."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import load_latest, save
from slurm_resilience.checkpoint.dcp.local import STALE_S, LocalTier, default_base
from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import UntrustedCheckpoint
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import Fenced
from tests.unit.checkpoint import models, worlds

MESH = {"dp_shard": 2}


def _train_and_copy(rank: int, world: int, base: str) -> dict[str, Any]:
    """Shared checkpoint at 2, copies at 2, 3, 4 and (rank 0 only, its node died then) 5."""
    store = CheckpointStore.open(f"{base}/shared", attempt=1)
    if rank == 0:
        store.fence()
    tier = LocalTier("run", base=f"{base}/node{rank}", team=Team(), attempt=1, mesh=MESH)
    model, optimizer = models.build("fsdp", world)
    wanted: dict[str, Any] = {}
    for step in (1, 2, 3, 4, 5):
        models.train(model, optimizer, 1, seed=step)
        state = models.state(model, optimizer)
        if step == 2:
            save(store, state, step=step, mesh=MESH)
        if step >= 2 and (step < 5 or rank == 0):
            tier.save(state, step=step, extra={"samples": step}, per_rank={"rng": torch.tensor([rank])})
        if step == 4:
            wanted = models.whole(state)
    return wanted


def _relaunch(rank: int, world: int, base: str, attempt: int, mesh: dict[str, int]) -> Any:
    tier = LocalTier("run", base=f"{base}/node{rank}", team=Team(), attempt=attempt, mesh=mesh)
    state = models.state(*models.build("fsdp", world, seed=8))
    store = CheckpointStore.open(f"{base}/shared", attempt=attempt)
    latest = store.latest()
    found = tier.load(state, newer_than=latest)
    if found is None:
        if rank == 0:
            store.fence()
        shared = load_latest(store, state)
        assert shared is not None
        return "shared", shared.entry.step, models.whole(state), None, None
    return "local", found.entry.step, models.whole(state), found.extra, found.per_rank


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    base = tmp_path_factory.mktemp("trained")
    wanted, _ = worlds.run(2, _train_and_copy, str(base))
    return base, wanted


@pytest.fixture
def base(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(trained[0], tmp_path / "base")
    return tmp_path / "base"


def copies(base: Path, rank: int) -> list[Entry]:
    return CheckpointStore.open(base / f"node{rank}" / "run" / f"rank{rank:05d}-of-00002").entries()


def test_the_newest_that_all_have_is_loaded_bit_by_bit(base: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    assert [entry.step for entry in copies(base, 0)] == [5, 4]
    assert [entry.step for entry in copies(base, 1)] == [4, 3]
    for rank, (kind, step, state, extra, own) in enumerate(worlds.run(2, _relaunch, str(base), 2, MESH)):
        assert (kind, step, extra) == ("local", 4, {"samples": 4})
        assert models.differences(state, trained[1]) == []
        assert own["rng"].tolist() == [rank]


@pytest.mark.parametrize("what", ["damaged", "gone", "another mesh", "older than the shared one"])
def test_otherwise_the_shared_one_is_loaded_over_everything(base: Path, what: str) -> None:
    mesh, newest = MESH, copies(base, 1)[0]
    path = base / "node1" / "run" / "rank00001-of-00002" / newest.name
    if what == "damaged":
        raw = bytearray((path / names.shard_file(0)).read_bytes())
        raw[len(raw) // 2] ^= 1
        (path / names.shard_file(0)).write_bytes(raw)
    elif what == "gone":
        shutil.rmtree(base / "node1")
    elif what == "another mesh":
        mesh = {"dp_shard": 1, "tp": 2}
    else:
        worlds.run(2, _shared_at_nine, str(base))
    (kind, step, state, _, _), (other, _, other_state, _, _) = worlds.run(2, _relaunch, str(base), 2, mesh)
    assert (kind, other) == ("shared", "shared")
    assert step == (9 if what.startswith("older") else 2)
    assert models.differences(state, other_state) == []


def _shared_at_nine(rank: int, world: int, base: str) -> None:
    store = CheckpointStore.open(f"{base}/shared", attempt=1)
    if rank == 0:
        store.fence()
    save(store, models.state(*models.build("fsdp", world)), step=9, mesh=MESH)


def _changed_world(rank: int, world: int, base: str) -> Any:
    return LocalTier("run", base=f"{base}/node{rank}", team=Team(), attempt=2, mesh=MESH).common(newer_than=None)


def test_another_world_size_finds_none(base: Path) -> None:
    assert worlds.run(3, _changed_world, str(base)) == [None, None, None]


def _leftover(rank: int, world: int, base: str) -> None:
    old = LocalTier("run", base=base, team=Team.alone(), attempt=1)
    old.save({"w": torch.ones(3)}, step=1)
    new = LocalTier("run", base=base, team=Team.alone(), attempt=2)
    with pytest.raises(Fenced):
        old.save({"w": torch.ones(3)}, step=2)
    assert new.common(newer_than=None) == (1, 1)
    new.discard()
    assert not Path(base).exists()


def test_a_leftover_cannot_write_copies_any_more_and_nothing_is_left_behind(tmp_path: Path) -> None:
    worlds.run(1, _leftover, str(tmp_path / "node"))


def test_a_copy_whose_load_ended_an_attempt_is_not_loaded_again(tmp_path: Path) -> None:
    first = LocalTier("run", base=tmp_path / "node", team=Team.alone(), attempt=1)
    first.save({"w": torch.ones(3)}, step=1)
    first.save({"w": torch.ones(3)}, step=2)
    second = LocalTier("run", base=tmp_path / "node", team=Team.alone(), attempt=2)
    newest = second.find(newer_than=None)
    assert newest is not None
    assert newest.step == 2
    second.begin(newest)
    third = LocalTier("run", base=tmp_path / "node", team=Team.alone(), attempt=3)
    older = third.find(newer_than=None)
    assert older is not None
    assert older.step == 1
    third.begin(older)
    third.accept(older, "attempt 3")
    again = LocalTier("run", base=tmp_path / "node", team=Team.alone(), attempt=4).find(newer_than=None)
    assert again is not None
    assert (again.step, again.attempts) == (1, 0)


def test_copies_of_other_runs_go_once_nobody_has_touched_them_for_a_day(tmp_path: Path) -> None:
    base = tmp_path / "node"
    for run in ("old", "young"):
        LocalTier(run, base=base, team=Team.alone(), attempt=1).save({"w": torch.ones(3)}, step=1)
    (base / "not ours").mkdir()
    for folder, age_s in (("old", STALE_S + 60), ("young", STALE_S - 60), ("not ours", STALE_S + 60)):
        os.utime(base / folder, (time.time() - age_s,) * 2)
    LocalTier("new", base=base, team=Team.alone(), attempt=1)
    assert sorted(path.name for path in base.iterdir()) == ["new", "not ours", "young"]


def test_a_place_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "node"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(UntrustedCheckpoint, match="not ours alone"):
        LocalTier("run", base=base, team=Team.alone(), attempt=1)
    base.rmdir()
    base.symlink_to(tmp_path)
    with pytest.raises(UntrustedCheckpoint, match="not ours alone"):
        LocalTier("run", base=base, team=Team.alone(), attempt=1)


def test_the_default_place_is_the_users_own_in_memory() -> None:
    assert default_base().parent == Path("/dev/shm")
    assert default_base().name.endswith(f"-{os.geteuid()}")
