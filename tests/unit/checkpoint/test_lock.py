"""The lock serves upkeep: it excludes where it can, never spins, and a dead holder's goes only on proof."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import Timeout

from slurm_resilience._clock import boot_id
from slurm_resilience.checkpoint import filesystem, names
from slurm_resilience.checkpoint.lock import ExistenceLock, RootLock, process_started
from tests.unit.checkpoint.drafts import commit, opened

HOLD = """
import sys
from slurm_resilience.checkpoint.lock import RootLock
with RootLock(sys.argv[1]).held() as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def test_another_process_is_kept_out_and_waiting_is_bounded(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    lock = RootLock(tmp_path, wait_s=4.0)
    began = time.monotonic()
    with lock.held() as held:
        assert held is False
    first = time.monotonic() - began
    with lock.held() as held:
        assert held is False
    second = time.monotonic() - began - first
    assert first >= 4.0
    assert second < first
    holder.stdin.close()
    holder.wait(60)
    with lock.held() as held:
        assert held is True


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system without flock.  Counts how often it is asked."""
    asked: list[int] = []

    def missing(fd: int, operation: int) -> None:
        asked.append(operation)
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    return asked


def test_a_file_system_without_flock_is_said_so_and_does_not_spin(
    tmp_path: Path, no_flock: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """filelock#67 spun for ever here."""
    store = opened(tmp_path)
    newest = [commit(store, step) for step in (1, 2, 3)][-1]
    assert 0 < len(no_flock) < 5
    assert store.latest() == newest
    assert len([r for r in caplog.records if "has no flock" in r.message]) == 1
    assert not (tmp_path / names.EXISTENCE_LOCK).exists()


def me(**changes: object) -> dict[str, object]:
    about = {"attempt": 3, "node": socket.gethostname(), "boot_id": boot_id(), "pid": os.getpid()}
    return {**about, "started": process_started(os.getpid()), **changes}


@pytest.mark.parametrize(
    ("holder", "proof"),
    [
        (me(), False),
        (me(attempt=2), True),
        (me(attempt=None), False),
        (me(boot_id="another boot"), True),
        (me(pid=2**22 + 7), True),
        (me(started=1), True),
        (me(node="elsewhere", boot_id="another boot", pid=2**22 + 7), False),
        (me(node="elsewhere", attempt=2), True),
        (me(boot_id="", pid=2**22 + 7), False),
        ("torn", False),
    ],
)
def test_an_existence_lock_is_taken_over_on_proof_and_never_by_age(tmp_path: Path, holder: object, proof: bool) -> None:
    """Its holder was killed on a node that is gone (huggingface_hub#3944)."""
    path = tmp_path / "held"
    path.write_text(json.dumps(holder) if isinstance(holder, dict) else '{"attempt": 2,')
    os.utime(path, (1_000_000_000, 1_000_000_000))
    lock = ExistenceLock(path, attempt=3)
    if proof:
        release = lock.acquire(0.0)
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(Timeout):
            ExistenceLock(path, attempt=3).acquire(0.05)
        release()
        assert os.listdir(tmp_path) == []
    else:
        with pytest.raises(Timeout):
            lock.acquire(0.05)
        assert path.exists()


def test_a_lock_that_can_be_neither_had_nor_made_stops_nobody(
    tmp_path: Path, no_flock: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(ExistenceLock, "_create", refuse)
    with caplog.at_level(logging.WARNING), RootLock(tmp_path).held() as held:
        assert held is False
    assert "cannot be locked" in caplog.text


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home rw,relatime - nfs4 srv:/home rw,vers=4.2,local_lock=none
31 22 0:41 / /old rw,relatime - nfs srv:/old rw,vers=3,local_lock=all
32 22 0:42 / /odd rw,relatime - nfs srv:/odd rw,vers=3,local_lock=none
33 22 0:43 / /scratch rw,relatime - lustre mgs:/s rw,flock
34 22 0:44 / /scratch/no rw,relatime - lustre mgs:/t rw,noflock
35 22 0:45 / /with\\040space rw,relatime - fuse.sshfs x rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "reach"),
    [
        ("/somewhere", "ext4", "node"),
        ("/home/alice/run", "nfs4", "cluster"),
        ("/homely", "ext4", "node"),
        ("/old/x", "nfs", "node"),
        ("/odd/x", "nfs", "unknown"),
        ("/scratch/run", "lustre", "cluster"),
        ("/scratch/no/run", "lustre", "none"),
        ("/with space/run", "fuse.sshfs", "unknown"),
    ],
)
def test_how_far_locks_reach_is_told_by_the_mount(path: str, kind: str, reach: str) -> None:
    found = filesystem.of(path, mounts=MOUNTS)
    assert (found.kind, found.reach) == (kind, reach)
    assert kind in str(found)


def test_exclusion_is_tried_with_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem.excludes(tmp_path) is True
    monkeypatch.setattr(filesystem, "_TRY", "import sys; sys.exit(0)")
    assert filesystem.excludes(tmp_path) is False
    assert os.listdir(tmp_path) == []


def test_no_locks_at_all_is_told_apart(tmp_path: Path, no_flock: list[int]) -> None:
    assert filesystem.excludes(tmp_path) is None
    assert len(no_flock) == 1
