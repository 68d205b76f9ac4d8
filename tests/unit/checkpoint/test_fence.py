"""A leftover of an older attempt cannot publish, mark or prune, whatever the lock does."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint import store as store_module
from slurm_resilience.checkpoint.fence import Fence
from slurm_resilience.checkpoint.lock import RootLock
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, Fenced
from tests.unit.checkpoint.drafts import commit, fill, opened


@pytest.fixture(params=["lock works", "lock excludes nobody"])
def lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "lock excludes nobody":

        @contextlib.contextmanager
        def useless(self: RootLock) -> Iterator[bool]:
            yield False

        monkeypatch.setattr(RootLock, "held", useless)


@pytest.mark.usefixtures("lock")
def test_an_older_attempt_can_do_nothing_any_more(tmp_path: Path) -> None:
    old = opened(tmp_path, attempt=1)
    first = commit(old, 10)
    draft = old.begin(20)
    about = fill(draft, b"late")
    new = opened(tmp_path, attempt=2)
    with pytest.raises(Fenced, match="attempt 2 owns it"):
        old.commit(draft, **about)
    with pytest.raises(Fenced):
        old.begin(30)
    with pytest.raises(Fenced):
        old.quarantine(first, "bad", by="old")
    with pytest.raises(Fenced):
        old.mark_verified(first, by="old")
    with pytest.raises(Fenced):
        old.pin(first)
    with pytest.raises(Fenced):
        old.fence()
    commit(new, 15)
    commit(new, 16)
    before = [entry.name for entry in new.entries()]
    with pytest.raises(Fenced):
        old.prune(Retention(keep_last=1), wait=True)
    assert [entry.name for entry in new.entries()] == before
    assert [entry.step for entry in new.candidates()] == [16, 15, 10]


@pytest.mark.usefixtures("lock")
def test_a_writer_frozen_after_its_last_check_still_cannot_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old attempt has passed every check and is frozen just before the rename; the new one opens the root then."""
    old = opened(tmp_path, attempt=1)
    draft = old.begin(20)
    about = fill(draft, b"late")
    real_rename = os.rename
    thawed = []

    def freeze(source: object, target: object) -> None:
        if Path(os.fspath(target)).name == draft.name and not thawed:  # type: ignore[call-overload]
            thawed.append(opened(tmp_path, attempt=2))
        real_rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", freeze)
    with pytest.raises(Fenced):
        old.commit(draft, **about)
    assert thawed, "the freeze never happened"
    assert thawed[0].latest() is None
    assert thawed[0].entries() == []
    fresh = commit(thawed[0], 5)
    assert thawed[0].latest() == fresh


def test_what_an_older_attempt_published_before_the_fence_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was renamed, then frozen: the new attempt has seen it, and may have resumed from it."""
    old = opened(tmp_path, attempt=1)
    draft = old.begin(20)
    about = fill(draft, b"early")
    seen = []
    real = store_module.fsync_dir

    def freeze(path: Path) -> None:
        if not seen:
            seen.append(opened(tmp_path, attempt=2).latest())
        real(path)

    monkeypatch.setattr(store_module, "fsync_dir", freeze)
    with pytest.raises(Fenced):
        old.commit(draft, **about)
    assert seen[0] is not None
    assert CheckpointStore.open(tmp_path).latest() == seen[0]


def test_a_root_that_was_not_opened_for_writing_says_what_is_missing(tmp_path: Path) -> None:
    entry = commit(opened(tmp_path, attempt=1), 10)
    careless = CheckpointStore.open(tmp_path, attempt=5)
    for attempt in (lambda: careless.begin(20), lambda: careless.quarantine(entry, "bad", by="test")):
        with pytest.raises(CheckpointError, match="has not opened"):
            attempt()
    assert CheckpointStore.open(tmp_path).latest() == entry


def test_the_same_attempt_may_open_the_root_again(tmp_path: Path) -> None:
    commit(opened(tmp_path, attempt=3), 10)
    again = opened(tmp_path, attempt=3)
    commit(again, 20)
    assert again.newest_attempt() == 3
    assert [entry.step for entry in again.candidates()] == [20, 10]


def test_the_fence_folder_stays_small_and_never_falls(tmp_path: Path) -> None:
    for attempt in range(1, 30):
        opened(tmp_path, attempt=attempt)
    assert len(os.listdir(tmp_path / names.FENCE)) <= 2
    assert Fence(tmp_path).current() == 29
    assert Fence(tmp_path).owner()["job_id"] == "42"


def test_a_foreign_or_torn_fence_file_still_fences(tmp_path: Path) -> None:
    opened(tmp_path, attempt=1)
    (tmp_path / names.FENCE / "a00007").write_bytes(b"")
    (tmp_path / names.FENCE / "README").write_bytes(b"")
    with pytest.raises(Fenced, match="attempt 7"):
        opened(tmp_path, attempt=6)


def test_being_fenced_survives_pickling_with_its_evidence(tmp_path: Path) -> None:
    opened(tmp_path, attempt=2)
    with pytest.raises(Fenced) as caught:
        opened(tmp_path, attempt=1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is Fenced
    assert str(again) == str(caught.value)
    assert "job 42" in str(again)


def test_unfinished_saves_of_older_attempts_are_moved_away(tmp_path: Path) -> None:
    """A killed save left its directory; saving the same step again must not meet it (Automodel#3254)."""
    old = opened(tmp_path, attempt=1)
    commit(old, 30)
    left = old.begin(40)
    fill(left, b"half")
    new = opened(tmp_path, attempt=2)
    assert not left.path.exists()
    again = commit(new, 40)
    assert again.name != left.name
    assert new.latest() == again
