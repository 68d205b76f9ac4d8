"""What was saved is what is loaded, bit for bit, in any world; what cannot be saved or loaded fails on every rank."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import load, load_latest, save
from slurm_resilience.checkpoint.errors import CorruptCheckpoint, MismatchedCheckpoint, UntrustedCheckpoint
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, NoValidCheckpoint
from tests.unit.checkpoint import models, worlds


def _store(root: str, rank: int, attempt: int = 1, **how: Any) -> CheckpointStore:
    store = CheckpointStore.open(root, attempt=attempt, job_id="42", **how)
    if rank == 0:
        store.fence()
    return store


def _save(rank: int, world: int, root: str, kind: str, steps: tuple[int, ...] = (3,)) -> tuple[str, dict[str, Any], float]:
    """Train and save; returns the last entry's name, the whole state that was saved, and the loss of the step after it."""
    model, optimizer = models.build(kind, world)
    store = _store(root, rank)
    done, name, saved = 0, "", {}
    for step in steps:
        models.train(model, optimizer, step - done, seed=step)
        done = step
        state = models.state(model, optimizer)
        own = {"rng": torch.full((3,), rank, dtype=torch.uint8), "python": [rank, None, "x"]}
        entry = save(
            store, state, step=step, metrics={"loss": 0.5}, extra={"samples": step * 12}, per_rank=own, mesh={"dp": world}
        )
        name, saved = entry.name, models.whole(state)
    return name, saved, models.train(model, optimizer, 1, seed=99)


def _load(rank: int, world: int, root: str, kind: str) -> tuple[Any, dict[str, Any], float, Any]:
    model, optimizer = models.build(kind, world, seed=1)
    state = models.state(model, optimizer)
    result = load_latest(_store(root, rank, 2), state)
    assert result is not None
    models.restore(model, optimizer, state)
    now = models.whole(models.state(model, optimizer))
    return result.entry, now, models.train(model, optimizer, 1, seed=99), (result.extra, result.per_rank)


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (("fsdp", 4), [("fsdp", 4), ("fsdp", 3), ("ddp", 2), ("plain", 1)]),
        (("2d", 4), [("2d", 4), ("fsdp", 3)]),
        (("ddp", 2), [("fsdp", 3)]),
        (("plain", 1), [("2d", 4)]),
    ],
)
def test_resharding_is_exact(tmp_path: Path, source: tuple[str, int], targets: list[tuple[str, int]]) -> None:
    kind, world = source
    (name, saved, loss), *_ = worlds.run(world, _save, str(tmp_path), kind)
    if kind == "ddp":
        saved = {key.replace("module.", ""): value for key, value in saved.items()}
    for other_kind, other_world in targets:
        for rank, (entry, loaded, next_loss, (extra, own)) in enumerate(
            worlds.run(other_world, _load, str(tmp_path), other_kind)
        ):
            assert entry.name == name
            assert models.differences(saved, loaded) == []
            assert next_loss == pytest.approx(loss, rel=1e-6)
            assert extra == {"samples": 36}
            if other_world == world:
                assert own["rng"].tolist() == [rank] * 3
                assert own["python"] == [rank, None, "x"]
            else:
                assert own is None
        store = CheckpointStore.open(tmp_path, attempt=2)
        latest = next(store.candidates())
        store.mark_verified(latest, by="test")


def _plain_load(rank: int, world: int, path: str) -> list[str]:
    import torch.distributed.checkpoint as dcp

    model, optimizer = models.build("fsdp", world, seed=1)
    ours, theirs = models.state(model, optimizer), models.state(*models.build("fsdp", world, seed=2))
    root, name = os.path.split(path)
    store = CheckpointStore.open(root)
    load(store, store.index.entry(name), ours)
    dcp.load(theirs, checkpoint_id=path)
    return models.differences(models.whole(ours), models.whole(theirs))


def test_plain_dcp_reads_what_we_write(tmp_path: Path) -> None:
    (name, _, _), *_ = worlds.run(2, _save, str(tmp_path), "fsdp")
    assert worlds.run(2, _plain_load, str(tmp_path / name)) == [[], []]


def _single(rank: int, world: int, root: str) -> list[str]:
    """One process without any process group, odd tensors, nested containers."""
    assert not dist.is_initialized()
    big = torch.arange(3 * (1 << 20), dtype=torch.float32).reshape(3, -1)
    state: dict[str, Any] = {
        "big": big,
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "view": torch.arange(100.0)[10:20],
        "thirty": torch.arange(30, dtype=torch.uint8),
        "sixteen": torch.arange(16, dtype=torch.uint8),
        "scalar": torch.tensor(7),
        "list": [torch.ones(2), {"x": 1, "y": (1, "two", None)}],
        "float": float("inf"),
    }
    store = _store(root, 0)
    entry = save(store, state, step=1)
    empty = {
        "big": torch.zeros_like(big),
        "transposed": torch.zeros(4, 3),
        "conj": torch.zeros(2, dtype=torch.complex64),
        "view": torch.zeros(10),
        "thirty": torch.zeros(30, dtype=torch.uint8),
        "sixteen": torch.zeros(16, dtype=torch.uint8),
        "scalar": torch.tensor(0),
        "list": [torch.zeros(2), {"x": 0, "y": ()}],
        "float": 0.0,
    }
    result = load(store, entry, empty)
    assert result.bytes_read >= big.nbytes
    assert empty["list"][1] == {"x": 1, "y": (1, "two", None)}
    return models.differences(models.whole(state), {**models.whole(empty), "list": state["list"]})


def test_odd_tensors_in_one_process(tmp_path: Path) -> None:
    assert worlds.run(1, _single, str(tmp_path)) == [[]]


def _bad_loads(rank: int, world: int, root: str) -> list[str]:
    """Every way in which a checkpoint does not fit; the target stays untouched."""
    store = _store(root, rank)
    entry = save(store, {"model": {"w": torch.ones(4), "n": 1, "b": torch.ones(2)}}, step=1)
    said = []
    for wrong in (
        {"w": torch.zeros(4), "n": 0, "b": torch.zeros(2), "more": torch.zeros(1)},
        {"w": torch.zeros(5), "n": 0, "b": torch.zeros(2)},
        {"w": torch.zeros(4, dtype=torch.bfloat16), "n": 0, "b": torch.zeros(2)},
        {"w": torch.zeros(4), "n": torch.tensor(0), "b": torch.zeros(2)},
        {"w": 0, "n": 0, "b": torch.zeros(2)},
        {"w": torch.zeros(4), "n": 0},
    ):
        with pytest.raises(MismatchedCheckpoint) as caught:
            load(store, entry, {"model": wrong})
        said.append(caught.value.what)
        assert all(not value.any() for value in wrong.values() if isinstance(value, torch.Tensor))
    load(store, entry, {"model": {"w": torch.zeros(4)}}, strict=False)
    latest = store.latest()
    assert latest is not None
    assert latest.usable
    return said


def test_a_checkpoint_of_another_model_is_refused_with_all_differences_and_not_quarantined(tmp_path: Path) -> None:
    one, other = worlds.run(2, _bad_loads, str(tmp_path))
    assert one == other
    for said, expected in zip(
        one, ["more was not saved", "shape", "bfloat16", "tensor is asked", "int is asked", "nobody asks"], strict=True
    ):
        assert expected in said


DAMAGES = [
    "flipped bit",
    "truncated shard",
    "missing shard",
    "swapped shards",
    "stale metadata",
    "empty metadata",
    "zero-filled shard",
    "empty files",
    "flipped bit in bytes",
    "manifest of an older one",
    "everything empty",
]


def damage(kind: str, path: Path, older: Path) -> None:
    shard, other = path / names.shard_file(0), path / names.shard_file(1)
    if kind == "flipped bit":
        from slurm_resilience.checkpoint.manifest import read_manifest

        item = max((item for item in read_manifest(path).items if item.file == shard.name), key=lambda item: item.data_length)
        raw = bytearray(shard.read_bytes())
        raw[item.data_offset + item.data_length // 2] ^= 4
        shard.write_bytes(raw)
    elif kind == "flipped bit in bytes":
        from slurm_resilience.checkpoint.manifest import read_manifest

        item = next(item for item in read_manifest(path).items if not item.dtype)
        raw = bytearray((path / item.file).read_bytes())
        raw[item.offset + item.length - 30] ^= 1
        (path / item.file).write_bytes(raw)
    elif kind == "truncated shard":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "missing shard":
        other.unlink()
    elif kind == "swapped shards":
        keep = shard.read_bytes()
        shard.write_bytes(other.read_bytes())
        other.write_bytes(keep)
    elif kind == "stale metadata":
        shutil.copy(older / names.METADATA, path / names.METADATA)
    elif kind == "empty metadata":
        (path / names.METADATA).write_bytes(b"")
    elif kind == "zero-filled shard":
        shard.write_bytes(bytes(shard.stat().st_size))
    elif kind == "empty files":
        for file in (shard, other, path / names.METADATA):
            file.write_bytes(b"")
    elif kind == "everything empty":
        for file in path.iterdir():
            file.write_bytes(b"")
    elif kind == "manifest of an older one":
        shutil.copy(older / names.MANIFEST, path / names.MANIFEST)
    else:
        raise ValueError(kind)


def _fall_back(rank: int, world: int, root: str, copies: list[str]) -> list[tuple[int, list[tuple[int, str]], bool]]:
    out = []
    for copy in copies:
        model, optimizer = models.build("fsdp", world, seed=1)
        state = models.state(model, optimizer)
        store = _store(copy, rank, 2)
        dist.barrier()
        result = load_latest(store, state)
        assert result is not None
        reference = models.state(*models.build("fsdp", world, seed=3))
        load(CheckpointStore.open(root), CheckpointStore.open(root).index.entry(result.entry.name), reference)
        same = models.differences(models.whole(state), models.whole(reference)) == []
        out.append((result.entry.step, [(entry.step, reason) for entry, reason in result.rejected], same))
    return out


def test_every_damage_is_found_quarantined_with_its_reason_and_the_older_one_used(tmp_path: Path) -> None:
    """Each kind of damage, to the newest one and to the newest two (diffusion-pipe#159)."""
    root = tmp_path / "root"
    worlds.run(2, _save, str(root), "fsdp", (1, 2, 3))
    copies = []
    for kind in DAMAGES:
        for count in (1, 2):
            copy = tmp_path / f"{kind} {count}"
            shutil.copytree(root, copy)
            newest = CheckpointStore.open(copy).entries()
            for entry in newest[:count]:
                damage(kind, copy / entry.name, copy / newest[2].name)
            copies.append((copy, count))
    outcomes, other = worlds.run(2, _fall_back, str(root), [str(copy) for copy, _ in copies])
    assert outcomes == other
    for (copy, count), (step, rejected, same) in zip(copies, outcomes, strict=True):
        assert step == 3 - count, copy.name
        assert same, copy.name
        found = {entry.step: entry for entry in CheckpointStore.open(copy).entries()}
        in_time = not copy.name.startswith(("manifest", "everything"))  # the next attempt's first look finds those already
        assert [bad for bad, _ in rejected] == ([3, 2][:count] if in_time else []), copy.name
        for bad in [3, 2][:count]:
            assert not found[bad].usable, copy.name
            assert found[bad].reason, copy.name
        if "bit" in copy.name:
            assert any(word in found[3].reason for word in ("model", "optimizer")), found[3].reason


def _none_left(rank: int, world: int, root: str) -> None:
    store = _store(root, rank)
    state = {"w": torch.ones(1000)}
    assert load_latest(store, state) is None
    for step in (1, 2):
        entry = save(store, state, step=step)
        (store.path(entry) / names.shard_file(0)).write_bytes(b"")
    with pytest.raises(NoValidCheckpoint, match="None of the 2"):
        load_latest(store, state)


def test_entries_of_which_none_can_be_loaded_are_an_error_and_no_entries_are_not(tmp_path: Path) -> None:
    worlds.run(1, _none_left, str(tmp_path))


def _untrusted(rank: int, world: int, root: str) -> None:
    store = _store(root, rank)
    entry = save(store, {"w": torch.ones(1000), "n": 1}, step=1)
    path = store.path(entry)
    for what in (path, path / names.METADATA, path / names.shard_file(0), Path(root)):
        mode = os.stat(what).st_mode & 0o7777
        os.chmod(what, mode | 0o020)
        with pytest.raises(UntrustedCheckpoint, match="can be written by others"):
            load(store, entry, {"w": torch.zeros(1000), "n": 0})
        os.chmod(what, mode)
    load(store, entry, {"w": torch.zeros(1000), "n": 0})
    if os.geteuid() == 0:
        os.chown(path / names.shard_file(0), 12345, 12345)
        with pytest.raises(UntrustedCheckpoint, match="belongs to somebody else"):
            load(store, entry, {"w": torch.zeros(1000), "n": 0})
    latest = store.latest()
    assert latest is not None
    assert latest.usable


def test_files_of_others_are_not_unpickled(tmp_path: Path) -> None:
    worlds.run(1, _untrusted, str(tmp_path))


def _modes(rank: int, world: int, root: str) -> dict[str, int]:
    os.umask(0)
    store = _store(root, rank)
    entry = save(store, {"w": torch.ones(10)}, step=1)
    store.mark_verified(entry, by="test")
    return {
        os.path.relpath(os.path.join(parent, name), root): os.stat(os.path.join(parent, name)).st_mode & 0o777
        for parent, folders, files in os.walk(root)
        for name in [*folders, *files]
    }


def test_nothing_is_ever_writable_by_others_and_a_group_can_read(tmp_path: Path) -> None:
    (modes,) = worlds.run(1, _modes, str(tmp_path / "root"))
    assert len(modes) >= 10
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o022 or mode & 0o444 != 0o444} == {}


class _Boom(torch.nn.Module):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


def _one_rank_fails(rank: int, world: int, root: str, stage: str) -> tuple[str, float, list[int]]:
    store = _store(root, rank)
    good = {"w": torch.ones(8), f"own{rank}": torch.ones(1)}
    save(store, good, step=1)
    dist.barrier()
    began = time.monotonic()
    bad: dict[str, Any] = {**good}
    if rank == 2:
        if stage == "planning":
            bad["obj"] = {"a.b": 1, "a": {"b": 2}}
        elif stage == "pickling":
            bad["obj"] = lambda: None
        elif stage == "writing":
            os.open  # noqa: B018 - the next line takes the directory away under this rank only
            store.fence_token.check(1)
    if stage == "writing" and rank == 2:
        import slurm_resilience.checkpoint.dcp.write as write

        real = write.os.open

        def refuse(path: Any, *rest: Any, **more: Any) -> int:
            if str(path).endswith(".distcp"):
                raise OSError(5, "Input/output error", str(path))
            return real(path, *rest, **more)

        write.os = type("os", (), {**{k: getattr(os, k) for k in dir(os)}, "open": staticmethod(refuse)})  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        save(store, bad, step=2)
    return str(caught.value), time.monotonic() - began, [entry.step for entry in store.entries()]


@pytest.mark.parametrize(
    ("stage", "says"), [("planning", "duplicated"), ("pickling", "pickle"), ("writing", "Input/output error")]
)
def test_what_fails_on_one_rank_fails_on_all_at_once_with_its_name(tmp_path: Path, stage: str, says: str) -> None:
    results = worlds.run(4, _one_rank_fails, str(tmp_path), stage)
    for text, seconds, steps in results:
        assert "rank 2" in text
        assert says in text
        assert seconds < worlds.GROUP_TIMEOUT_S / 2, "sooner than the group's own time-out"
        assert steps == [1]


def _killed_in_mid_save(rank: int, world: int, root: str) -> tuple[str, float, list[int]]:
    store = _store(root, rank)
    save(store, {"w": torch.ones(8)}, step=1)
    began = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(CheckpointError) as caught:
        save(store, {"w": torch.ones(8)}, step=2)
    return str(caught.value), time.monotonic() - began, [entry.step for entry in store.entries()]


def test_a_killed_rank_is_noticed_within_seconds_and_nothing_is_published(tmp_path: Path) -> None:
    first, second, third = worlds.run(3, _killed_in_mid_save, str(tmp_path))
    assert isinstance(second, worlds.Killed)
    for text, seconds, steps in (first, third):
        assert "lost contact" in text
        assert seconds < worlds.GROUP_TIMEOUT_S / 2, "sooner than the group's own time-out"
        assert steps == [1]


def _no_space(rank: int, world: int, root: str, blind: bool) -> list[str]:
    """A file system that fills up in the middle of a save, and a job that goes on."""
    store = _store(root, rank)
    said = []
    if blind:
        from slurm_resilience.checkpoint import space

        space.free_bytes = lambda path: 1 << 40  # as under a quota: the file system does not say how little is left
    save(store, {"w": torch.ones(1 << 18)}, step=1)
    for step, size in ((2, 3 << 20), (3, 1 << 18)):
        try:
            save(store, {"w": torch.ones(size) * step}, step=step)
        except CheckpointError as error:
            said.append(str(error))
    result = load_latest(store, state := {"w": torch.zeros(1 << 18)})
    assert result is not None
    assert result.entry.step == 3
    assert float(state["w"].sum()) == 3 * (1 << 18)
    return said


@pytest.mark.parametrize(("blind", "says"), [(False, "no room"), (True, "No space left on device")])
def test_a_full_file_system_fails_the_save_and_nothing_else(small_tmpfs: Path, blind: bool, says: str) -> None:
    (said,) = worlds.run(1, _no_space, str(small_tmpfs / "root"), blind)
    assert len(said) == 1
    assert says in said[0]


def _gone_meanwhile(rank: int, world: int, root: str) -> None:
    store = _store(root, rank)
    entry = save(store, {"w": torch.ones(8)}, step=1)
    shutil.rmtree(store.path(entry))
    with pytest.raises(CorruptCheckpoint, match="is gone"):
        load(store, entry, {"w": torch.zeros(8)})


def test_a_checkpoint_that_went_away_is_said_so(tmp_path: Path) -> None:
    worlds.run(1, _gone_meanwhile, str(tmp_path))


class _Object:
    """Something stateful that fails, or ends the process, where it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.value = torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.value = state["value"].clone()


def _exceptions(rank: int, world: int, root: str) -> tuple[list[str], list[float]]:
    """Failures of a user's object on one rank, at save and at load; DCP's own exception is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    store = _store(root, rank)
    good = _Object()
    entry = save(store, {"thing": good, "w": torch.zeros(1)}, step=1)
    said, seconds = [], []
    for error in (ValueError("bad value"), CheckpointException("inner", {1: (ValueError("x"), None)}), SystemExit("leaving")):  # type: ignore[dict-item]
        broken = _Object(error if rank == 1 else None)
        for attempt in (
            lambda b=broken: save(store, {"thing": b, "w": torch.zeros(1)}, step=2),
            lambda b=broken: load(store, entry, {"thing": b, "w": torch.zeros(1)}),
        ):
            began = time.monotonic()
            try:
                attempt()
            except CheckpointError as caught:
                said.append(str(caught))
            except SystemExit as caught:
                said.append(f"left: {caught}")
            seconds.append(time.monotonic() - began)
    good.value.zero_()
    load(store, entry, {"thing": good, "w": torch.zeros(1)})
    assert good.value.tolist() == [1.0, 1.0]
    return said, seconds


def test_a_users_object_that_fails_on_one_rank_fails_on_all_and_only_signals_keep_their_kind(tmp_path: Path) -> None:
    """`except Exception` lets DCP's CheckpointException pass, and a signal handler's SystemExit reaches all ranks."""
    (said, seconds), (own, _) = worlds.run(2, _exceptions, str(tmp_path))
    assert len(said) == len(own) == 6
    assert all("rank 1" in text for text in said)
    assert ["bad value" in text for text in said] == [True, True, False, False, False, False]
    assert ["CheckpointException" in text for text in said] == [False, False, True, True, False, False]
    assert own[4:] == ["left: leaving", "left: leaving"]
    assert max(seconds) < 10


def _two_layouts(rank: int, world: int, root: str) -> list[str]:
    """Two state dicts that share a store and a planner class take turns."""
    store = _store(root, rank)
    one = {"w": torch.arange(6.0), "n": 1}
    other = {"w": torch.arange(8.0) + 100, "x": torch.ones(3), "n": 2}
    wrong = []
    for step, state in enumerate((one, other, one, other, other), start=1):
        entry = save(store, state, step=step)
        empty = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in state.items()}
        load(store, entry, empty)
        wrong += models.differences(models.whole(state), models.whole(empty))
    if rank == 1:
        one = {**one, "late": torch.ones(1)}
    entry = save(store, one, step=9)
    assert "late" in store.manifest(entry).tensors
    return wrong


def test_different_state_dicts_never_share_a_plan(tmp_path: Path) -> None:
    """torch's own planner keeps plans by its class's name, for all state dicts alike."""
    assert worlds.run(2, _two_layouts, str(tmp_path)) == [[], []]


def test_metadata_that_names_what_nobody_wrote_is_not_committed(tmp_path: Path) -> None:
    """A writer's thread failed and the save said it had succeeded (pytorch#191391)."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata

    from slurm_resilience.checkpoint.dcp.layout import write_metadata
    from slurm_resilience.checkpoint.dcp.write import Shard

    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), chunks)})
    with pytest.raises(CheckpointError, match=r"w at .* was planned and no rank has written it"):
        write_metadata(tmp_path, "name", metadata, [Shard("__0_0.distcp", 0, [], [])])
    assert os.listdir(tmp_path) == []


def _write_back_fails(rank: int, world: int, root: str) -> str:
    """The kernel tells of a failed write-back once: to the early flush, and not to the fsync at the end."""
    import slurm_resilience.checkpoint.dcp.write as write

    store = _store(root, rank)
    write.FLUSH_BYTES = 1 << 16

    def lost(fd: int) -> None:
        raise OSError(5, "Input/output error")

    os.fdatasync = lost
    with pytest.raises(CheckpointError) as caught:
        save(store, {"w": torch.ones(1 << 17), "v": torch.ones(1 << 17)}, step=1)
    assert store.entries() == []
    return str(caught.value)


def test_a_write_back_that_failed_early_fails_the_save(tmp_path: Path) -> None:
    assert "Input/output error" in worlds.run(1, _write_back_fails, str(tmp_path))[0]
