"""What is read ahead: the shards of this node's ranks, of the newest checkpoint that is whole."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest

from slurm_resilience.checkpoint import names
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime import prefetch
from tests.unit.runtime.agent_stage import Stage
from tests.unit.runtime.test_agent import PAGED

SIZE = 1 << 20


def checkpoint(root: Path, step: int, attempt: int, *, ranks: int = 2, whole: bool = True) -> Path:
    folder = root / names.new_name(step, attempt)
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / names.shard_file(rank)).write_bytes(os.urandom(SIZE))
    (folder / names.METADATA).write_bytes(b"m" * 100)
    if whole:
        (folder / names.MANIFEST).write_text("{}")
    return folder


def resident(path: Path) -> int:
    """Pages of a file that are in memory.  Source: mincore(2)."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = (len(view) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        seen = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(view)
        try:
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view)), seen) == 0
        finally:
            del anchor
        return sum(page & 1 for page in seen)


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_the_newest_whole_checkpoint_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    checkpoint(tmp_path, 90, 1)
    wanted = checkpoint(tmp_path, 20, 3)  # attempt 3 had gone back
    checkpoint(tmp_path, 30, 3, whole=False)
    (tmp_path / names.writing_dir(3)).mkdir()
    assert prefetch.newest(tmp_path) == wanted


def test_own_shards_come_into_memory_and_no_others(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 10, 1)
    mine, other = folder / names.shard_file(1), folder / names.shard_file(0)
    for path in (mine, other):
        evict(path)
    if resident(mine):
        pytest.skip("not run: this file system keeps its pages")
    assert prefetch.prefetch(tmp_path, {1}) == {"checkpoint": folder.name, "files": 3, "bytes": SIZE + 100 + 2}
    deadline = time.monotonic() + 30
    while resident(mine) < SIZE // mmap.PAGESIZE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (resident(mine), resident(other)) == (SIZE // mmap.PAGESIZE, 0)


def test_no_room_means_no_reading_and_nothing_there_means_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefetch.prefetch(tmp_path, {0}) == {}
    folder = checkpoint(tmp_path, 10, 1)
    monkeypatch.setattr(prefetch, "_free_bytes", lambda: SIZE)  # half of it is less than a shard
    assert prefetch.prefetch(tmp_path, {0, 1, 7}) == {"checkpoint": folder.name, "files": 2, "bytes": 102}


def test_an_agent_reads_ahead_when_a_fault_ends_its_ranks_and_not_at_another_end(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.script(PAGED)
        folder = checkpoint(stage.run_dir / "checkpoints", 10, 1)
        peer = stage.join()
        log = stage.run_dir / "logs" / "agent-node1.log"
        for attempt, look in ((1, ""), (2, "node")):
            stage.launch(peer, attempt)
            stage.started(peer, attempt)
            peer.send(m.Kill(attempt, look=look))
            stage.until(lambda attempt=attempt: peer.of(m.Stopped, attempt=attempt))
            assert look or "read ahead" not in log.read_text()
        stage.until(lambda: f"of {folder.name} are being read ahead" in log.read_text(), what="word of it")
