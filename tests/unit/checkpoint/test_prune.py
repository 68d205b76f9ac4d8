"""Retention removes what the policy names and nothing that somebody may still need."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience._clock import boot_id
from slurm_resilience.checkpoint import names, space
from slurm_resilience.checkpoint.bench import Bench
from slurm_resilience.checkpoint.entry import Entry, State
from slurm_resilience.checkpoint.retention import Retention, kept
from slurm_resilience.checkpoint.space import NoSpace
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError
from tests.unit.checkpoint.drafts import commit, fill, opened


def steps(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store.entries()]


def entry(step: int, **about: object) -> Entry:
    base = Entry(f"step-{step:08d}-a00001-00000000", step, 1, 1, 10, "x", committed_at=step * 60.0)
    return base.with_marks(**about)


def test_the_newest_stay(tmp_path: Path) -> None:
    store = opened(tmp_path, retention=Retention(keep_last=2))
    for step in (10, 20, 30, 40):
        commit(store, step)
    assert steps(store) == [40, 30]
    assert [e.step for e in store.candidates()] == [40, 30]


def test_each_reason_keeps_its_own() -> None:
    entries = [entry(step, metrics={"loss": abs(step - 42) / 10}) for step in range(5, 100, 5)]
    entries[1] = entry(10, pinned=True)
    entries[2] = entry(15, state=State.VERIFIED)
    entries[3] = entry(20, state=State.QUARANTINED, reason="bad")
    policy = Retention(keep_last=2, every_steps=40, every_hours=1.0, best="loss", keep_quarantined=1)
    why = {int(name[5:13]): reason for name, reason in kept(entries, policy, attempt=1, being_read={entries[6].name}).items()}
    assert why == {
        10: "pinned",
        35: "being read",
        15: "the newest verified one",
        95: "the newest one that nobody failed to load",
        90: "one of the newest 2",
        80: "first in 40 steps",
        40: "first in 40 steps",
        5: "first in 40 steps",
        60: "first in 1 hours",
        20: "quarantined, kept as evidence",
    } | {40: "first in 40 steps"}


marked = st.builds(
    entry,
    st.integers(1, 60),
    state=st.sampled_from([State.COMMITTED, State.VERIFIED, State.QUARANTINED]),
    attempts=st.integers(0, 2),
    pinned=st.booleans(),
    attempt=st.integers(1, 4),
)


@given(st.lists(marked, max_size=20, unique_by=lambda e: e.step), st.integers(1, 4), st.integers(1, 4))
def test_what_always_stays(entries: list[Entry], keep_last: int, attempt: int) -> None:
    why = kept(entries, Retention(keep_last=keep_last, keep_quarantined=0), attempt=attempt)
    newest_first = sorted(entries, key=lambda e: e.order, reverse=True)
    usable = [e for e in newest_first if e.usable]
    assert {e.name for e in usable[:keep_last]} <= why.keys()
    assert {e.name for e in entries if e.pinned or e.attempt > attempt} <= why.keys()
    for some in ([e for e in usable if e.state is State.VERIFIED], [e for e in usable if not e.attempts]):
        assert {e.name for e in some[:1]} <= why.keys()
    gone = [e for e in usable if e.name not in why]
    assert all(any(better.order > e.order for better in usable) for e in gone)


def test_abandoned_directories_do_not_count_and_are_cleaned_apart(tmp_path: Path) -> None:
    """Rests of killed saves pushed good checkpoints out elsewhere (torchtitan#4197)."""
    store = opened(tmp_path)
    for step in (10, 20, 30):
        commit(store, step)
    rests = [store.begin(step) for step in (40, 50, 60)]
    for draft in rests:
        fill(draft, b"half")
    again = opened(tmp_path)
    assert again.prune(Retention(keep_last=3), wait=True) == []
    assert all(draft.path.exists() for draft in rests), "seen only once: somebody may still write there"
    fill_more = rests[0].path / "more"
    fill_more.write_bytes(b"x")
    again.prune(Retention(keep_last=3), wait=True)
    assert [draft.path.exists() for draft in rests] == [True, False, False]
    assert steps(again) == [30, 20, 10]


def test_our_own_save_in_progress_is_never_swept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    draft = store.begin(10)
    for _ in range(3):
        store.prune(Retention(), wait=True)
    store.commit(draft, **fill(draft, b"data"))
    assert steps(store) == [10]


def test_nothing_is_pruned_for_a_save_that_is_not_durable_yet(tmp_path: Path) -> None:
    """The older one went when the newer was only announced (KempnerForge#102)."""
    store = opened(tmp_path, retention=Retention(keep_last=1))
    commit(store, 10)
    draft = store.begin(20)
    about = fill(draft, b"data")
    assert steps(store) == [10]
    store.commit(draft, **about)
    assert steps(store) == [20]


def test_one_that_is_read_stays_until_the_reader_is_done(tmp_path: Path) -> None:
    store = opened(tmp_path)
    old = commit(store, 10)
    commit(store, 20)
    evaluation = CheckpointStore.open(tmp_path)
    with evaluation.reading(old):
        assert store.prune(Retention(keep_last=1), wait=True) == []
    assert store.prune(Retention(keep_last=1), wait=True) == [old]


@pytest.mark.parametrize(
    ("about", "holds"),
    [
        ({"attempt": 0}, False),
        ({"attempt": 1}, True),
        ({"node": socket.gethostname(), "boot_id": "another", "attempt": None}, False),
        ({"node": socket.gethostname(), "boot_id": boot_id(), "pid": 2**22 + 1, "attempt": None}, False),
        ({"node": socket.gethostname(), "boot_id": boot_id(), "pid": 1, "attempt": None}, True),
        ({"node": "elsewhere", "boot_id": "another", "pid": 1, "attempt": None}, True),
        ({"node": "elsewhere", "until": 1000.0}, False),
        ("garbage", True),
    ],
)
def test_a_lease_is_void_only_on_proof(tmp_path: Path, about: object, holds: bool) -> None:
    store = opened(tmp_path)
    old = commit(store, 10)
    commit(store, 20)
    (tmp_path / names.LEASES).mkdir()
    (tmp_path / names.LEASES / f"{old.name}.0123abcd").write_text(json.dumps(about) if isinstance(about, dict) else "{")
    assert (store.prune(Retention(keep_last=1), wait=True) == []) is holds


def test_a_reader_that_comes_while_the_name_goes_gets_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    old = commit(store, 10)
    commit(store, 20)
    reading = CheckpointStore.open(tmp_path).reading(old)
    real_take = Bench.take

    def take(bench: Bench, path: Path) -> Path:
        reading.__enter__()
        return real_take(bench, path)

    monkeypatch.setattr(Bench, "take", take)
    assert store.prune(Retention(keep_last=1), wait=True) == []
    assert steps(store) == [20, 10]
    reading.__exit__(None, None, None)


def test_a_prune_that_the_file_system_refuses_is_harmless_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps a file that somebody holds open as .nfsXXXX: "directory not empty" (prime-rl#1763)."""
    store = opened(tmp_path, retention=Retention(keep_last=1))
    commit(store, 10)
    real = shutil.rmtree

    def not_empty(path: Path, *_: object, **__: object) -> None:
        raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", not_empty)
    commit(store, 20)
    store.prune(Retention(keep_last=1), wait=True)
    assert steps(store) == [20]
    assert "tried again" in caplog.text
    monkeypatch.setattr(shutil, "rmtree", real)
    store.prune(Retention(keep_last=1), wait=True)
    assert [name for name in os.listdir(tmp_path / names.writing_dir(1)) if name.startswith("gone-")] == []


def test_a_failing_prune_does_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, retention=Retention(keep_last=1))
    commit(store, 10)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(Bench, "take", refuse)
    newest = commit(store, 20)
    assert store.latest() == newest


def test_a_save_that_does_not_fit_makes_room_first_and_is_refused_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, retention=Retention(keep_last=3))
    for step in (10, 20, 30):
        commit(store, step, data=bytes(1 << 20))

    def free(path: Path) -> int:
        return (7 << 20) - (1 << 20) * len(list(tmp_path.glob("step-*")))

    monkeypatch.setattr(space, "free_bytes", free)
    store.begin(40, expected_bytes=4 << 20)
    assert steps(store) == [30]
    with pytest.raises(NoSpace, match="no room"):
        store.begin(50, expected_bytes=40 << 20)
    assert steps(store) == [30]


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"keep_last": 0}, {"best_count": 0}, {"best_is": "nicest"}):
        with pytest.raises(ValueError, match=r"at least|best_is"):
            Retention(**wrong)  # type: ignore[arg-type]


def test_every_checkpoint_gone_is_never_the_result(tmp_path: Path) -> None:
    store = opened(tmp_path)
    only = commit(store, 10)
    store.mark_attempted(only)
    store.quarantine(commit(store, 20), "bad", by="test")
    assert store.prune(Retention(keep_last=1, keep_quarantined=0), wait=True)[0].step == 20
    assert steps(store) == [10]
    shutil.rmtree(store.path(only))
    with pytest.raises(CheckpointError, match="is gone"):
        store.release(only)


def test_a_link_in_a_checkpoints_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lead to the whole file system, which nobody has to walk before the link is put away."""
    store = opened(tmp_path / "root")
    good = commit(store, 30)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").write_text("years of work")
    for step in (10, 20, 21):
        (tmp_path / "root" / names.new_name(step, 1)).symlink_to(tmp_path / "else")
    seen: list[str] = []
    real = os.walk
    monkeypatch.setattr(os, "walk", lambda top, *more, **how: seen.append(os.path.realpath(top)) or real(top, *more, **how))
    assert [entry.step for entry in store.prune(Retention(keep_last=1), wait=True)] == [10]
    assert str(tmp_path / "else") not in seen
    assert (tmp_path / "else" / "thesis.txt").exists()
    assert store.latest() == good
