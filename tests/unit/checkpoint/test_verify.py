"""Verification without torch finds every changed byte and names the tensor that it belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.dcp import save
from slurm_resilience.checkpoint.digest import CHUNK_BYTES
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import Problem, verify


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointStore, Entry]:
    store = CheckpointStore.open(tmp_path_factory.mktemp("root"), attempt=1)
    store.fence()
    state = {"small": torch.arange(10.0), "big": torch.arange(3 * CHUNK_BYTES // 4 + 5, dtype=torch.int32), "count": 3}
    return store, save(store, state, step=1)


def test_a_whole_one_has_no_problems_and_every_byte_is_read(saved: tuple[CheckpointStore, Entry]) -> None:
    store, entry = saved
    read: list[int] = []
    assert verify(store.path(entry), entry, progress=read.append) == []
    assert sum(read) >= 3 * CHUNK_BYTES


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_byte_of_any_file_is_found(saved: tuple[CheckpointStore, Entry], data: st.DataObject) -> None:
    store, entry = saved
    path = store.path(entry)
    manifest = store.manifest(entry)
    file = data.draw(st.sampled_from(sorted(os.listdir(path))))
    size = (path / file).stat().st_size
    if file == names.shard_file(0):
        item = data.draw(st.sampled_from(manifest.items))
        at = data.draw(st.integers(item.offset, item.offset + item.length - 1))
    else:
        at = data.draw(st.integers(0, size - 1))
    with open(path / file, "r+b") as handle:
        handle.seek(at)
        before = handle.read(1)
        handle.seek(at)
        handle.write(bytes([before[0] ^ data.draw(st.integers(1, 255))]))
    try:
        problems = verify(path, entry)
    finally:
        with open(path / file, "r+b") as handle:
            handle.seek(at)
            handle.write(before)
    assert problems
    assert {problem.file for problem in problems} == {file}
    if file == names.shard_file(0):
        assert [problem.key for problem in problems] == [item.key]


def test_which_chunk_is_bad_is_said(saved: tuple[CheckpointStore, Entry]) -> None:
    store, entry = saved
    item = next(item for item in store.manifest(entry).items if item.key == "big")
    path = store.path(entry) / item.file
    raw = path.read_bytes()
    damaged = bytearray(raw)
    damaged[item.data_offset + CHUNK_BYTES + 5] ^= 1
    path.write_bytes(damaged)
    try:
        (problem,) = verify(store.path(entry), entry)
    finally:
        path.write_bytes(raw)
    assert problem == Problem(item.file, "big", f"its data is damaged in 1 of 4 chunks, first at byte {CHUNK_BYTES}")


def test_missing_short_and_foreign_files_are_named(tmp_path: Path) -> None:
    store = CheckpointStore.open(tmp_path, attempt=1)
    store.fence()
    entry = save(store, {"w": torch.ones(10)}, step=1)
    path = store.path(entry)
    (path / "core.123").write_bytes(b"x")
    os.truncate(path / names.shard_file(0), 100)
    (path / names.METADATA).unlink()
    said = [str(problem) for problem in verify(path, entry)]
    assert len(said) == 3
    assert said[0] == "core.123: is not part of this checkpoint"
    assert any("has 100 bytes" in text for text in said)
    assert ".metadata: is missing" in said


def test_verification_does_not_import_torch() -> None:
    code = "import sys, slurm_resilience.checkpoint.verify, slurm_resilience.cli.checkpoints; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
