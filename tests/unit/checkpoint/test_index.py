"""The index finds the latest usable entry in constant time and is mended from the directories when it lies."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.checkpoint import index as index_module
from slurm_resilience.checkpoint import marks, names, sealed
from slurm_resilience.checkpoint.bench import Bench
from slurm_resilience.checkpoint.index import CheckpointIndex, Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import verify
from slurm_resilience.errors import CheckpointError
from tests.unit.checkpoint.drafts import FILE, commit, opened

_seen: list[tuple[str, str]] | None = None
_hooked = False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _seen is not None and (event == "open" or event.startswith(("os.", "fcntl."))):
        _seen.append((event, str(args[0])))


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, str]]]:
    """What the interpreter asks of the system meanwhile, by its own audit events."""
    global _seen, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def steps(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store.candidates()]


def test_an_empty_root_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore.open(tmp_path / "missing").latest() is None
    assert opened(tmp_path / "new").latest() is None


def test_the_latest_is_the_newest_and_a_reader_needs_no_attempt(tmp_path: Path) -> None:
    store = opened(tmp_path)
    made = [commit(store, step, metrics={"loss": 1.0 / step}) for step in (10, 20, 30)]
    assert CheckpointStore.open(tmp_path).latest() == made[-1]
    assert steps(store) == [30, 20, 10]


def test_order_comes_from_attempt_and_step_not_from_time(tmp_path: Path) -> None:
    """Clocks jump and file systems round times (tegu#22, transformers#26961)."""

    class Clock:
        now = 1_800_000_000.0

        def time(self) -> float:
            return self.now

        def monotonic(self) -> float:
            return 0.0

    clock = Clock()
    store = opened(tmp_path, clock=clock)
    commit(store, 10)
    clock.now -= 3600
    later = commit(store, 20)
    for folder in tmp_path.glob("step-*"):
        os.utime(folder, (1_700_000_000, 1_700_000_000))
        for file in folder.iterdir():
            os.utime(file, (1_700_000_000, 1_700_000_000))
    assert store.latest() == later
    assert store.rebuild()[0] == later
    resumed = opened(tmp_path, attempt=2)
    lower = commit(resumed, 15)
    assert resumed.latest() == lower


def test_the_head_never_outgrows_its_limit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for step in range(1, 15):
        commit(store, step, metrics={f"metric_{n}": n / 7 for n in range(20)})
        assert os.path.getsize(tmp_path / names.HEAD) <= index_module.HEAD_BYTES
    assert steps(store) == list(range(14, 0, -1))


def test_metrics_that_do_not_fit_are_refused_and_nothing_is_published(tmp_path: Path) -> None:
    store = opened(tmp_path)
    good = commit(store, 1)
    with pytest.raises(CheckpointError, match="does not fit into the index"):
        commit(store, 2, metrics={"text": "x" * 5000})
    assert store.latest() == good
    assert [entry.step for entry in store.entries()] == [1]


def test_a_lookup_lists_no_directory_takes_no_lock_and_opens_three_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for step in range(1, 40):
        commit(store, step)
    reader = CheckpointStore.open(tmp_path)
    with watched() as asked:
        latest = reader.latest()
    assert latest is not None
    assert latest.step == 39
    assert not [event for event, _ in asked if event in ("os.listdir", "os.scandir", "fcntl.flock", "fcntl.lockf")]
    assert sorted(os.path.basename(path) for event, path in asked if event == "open") == [
        names.HEAD,
        names.NEXT_HEAD,
        names.MANIFEST,
    ]
    with watched() as asked:
        reader.entries()
    assert "os.listdir" in [event for event, _ in asked]


@pytest.mark.parametrize("damage", ["missing", "empty", "zeros", "torn", "edited", "garbage", "newer"])
def test_a_bad_head_is_said_and_mended(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    for step in (10, 20):
        newest = commit(store, step)
    head = tmp_path / names.HEAD
    raw = head.read_bytes()
    if damage == "missing":
        head.unlink()
    elif damage == "newer":
        head.write_bytes(sealed.seal({"v": 99, "entries": []}))
    else:
        head.write_bytes(
            {"empty": b"", "zeros": bytes(len(raw)), "torn": raw[:-30], "edited": raw.replace(b'"step":20', b'"step":99'),
             "garbage": b"\xff\x00{"}[damage]
        )  # fmt: skip
    assert store.latest() == newest
    if damage != "missing":
        assert "cannot be believed" in caplog.text or "version" in caplog.text
    again = CheckpointIndex(tmp_path).lookup()
    assert again is not None
    assert again[0] == newest


def test_a_head_that_names_what_is_gone_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    old, new = commit(store, 10), commit(store, 20)
    shutil.rmtree(store.path(new))
    assert store.latest() == old
    assert "not there" in caplog.text


def test_a_head_that_is_older_than_the_directories_is_brought_up_to_date_by_the_next_attempt(tmp_path: Path) -> None:
    """The pointer was restored from a backup, or its update was lost (Automodel#3390)."""
    store = opened(tmp_path)
    commit(store, 10)
    stale = (tmp_path / names.HEAD).read_bytes()
    newest = commit(store, 20)
    (tmp_path / names.HEAD).write_bytes(stale)
    assert opened(tmp_path, attempt=2).latest() == newest


def test_a_crash_between_rename_and_index_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    commit(store, 10)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointIndex, "confirm", die)
        with pytest.raises(Killed):
            commit(store, 20)
    reader = CheckpointStore.open(tmp_path)
    latest = reader.latest()
    assert latest is not None
    assert latest.step == 20
    assert (tmp_path / names.NEXT_HEAD).exists()
    assert [entry.step for entry in opened(tmp_path, attempt=2).candidates()] == [20, 10]
    assert not (tmp_path / names.NEXT_HEAD).exists()


def test_an_announced_head_whose_checkpoint_never_came_is_ignored(tmp_path: Path) -> None:
    store = opened(tmp_path)
    entry = commit(store, 10)
    ghost = entry.with_marks(name=names.new_name(20, 1), step=20)
    CheckpointIndex(tmp_path).announce([ghost, entry])
    assert store.latest() == entry
    assert commit(store, 30) == store.latest()


def test_a_missing_index_never_means_a_silent_start_from_scratch(tmp_path: Path) -> None:
    """Dying between "remove latest" and "create latest" must leave a latest (DeepSpec#62)."""
    store = opened(tmp_path)
    entry = commit(store, 10)
    for name in (names.HEAD, names.HISTORY, names.LOCK):
        (tmp_path / name).unlink()
    shutil.rmtree(tmp_path / names.FENCE)
    assert CheckpointStore.open(tmp_path).latest() == entry


def test_a_reader_that_may_not_write_still_finds_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    entry = commit(store, 10)
    (tmp_path / names.HEAD).write_bytes(b"")

    def read_only(*_: object, **__: object) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Bench, "put", read_only)
    assert CheckpointStore.open(tmp_path).latest() == entry


def test_temporary_names_are_never_chosen(tmp_path: Path) -> None:
    """A temporary name that sorts after the real ones was chosen as latest elsewhere (flax#1200)."""
    store = opened(tmp_path)
    entry = commit(store, 10)
    for name in (
        "step-99999999-a99999-zzzzzzzz",
        "step-00000099-a00001-0123abcd.tmp",
        "step-00000099-a00001-0123abcd-tmp",
        "zz",
    ):
        shutil.copytree(store.path(entry), tmp_path / name)
    (tmp_path / names.HEAD).unlink()
    assert [e.name for e in store.candidates()] == [entry.name]


def test_a_directory_without_its_manifest_is_named_and_the_older_one_used(tmp_path: Path) -> None:
    """The highest number lacks its state file (transformers#35782), or is the rest of a kill (awsome-distributed-ai#190)."""
    store = opened(tmp_path)
    good, bad = commit(store, 20), commit(store, 30)
    (store.path(bad) / names.MANIFEST).unlink()
    assert store.latest() == good
    listed = {entry.step: entry for entry in store.entries()}
    assert not listed[30].usable
    assert "no manifest" in listed[30].reason


def test_a_swapped_directory_is_noticed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    good, bad = commit(store, 20), commit(store, 30)
    shutil.copy(store.path(good) / names.MANIFEST, store.path(bad) / names.MANIFEST)
    assert "manifest of another" in {entry.step: entry for entry in store.entries()}[30].reason
    (tmp_path / names.HEAD).unlink()
    assert store.latest() == good


def test_marks_survive_the_loss_of_the_index(tmp_path: Path) -> None:
    store = opened(tmp_path)
    entries = [commit(store, step) for step in (10, 20, 30, 40)]
    store.mark_verified(entries[0], by="resume")
    store.pin(entries[1])
    store.mark_attempted(entries[2])
    store.quarantine(entries[3], "loss differs", by="verification")
    before = [entry.to_json() for entry in store.entries()]
    (tmp_path / names.HEAD).unlink()
    store.rebuild()
    assert [entry.to_json() for entry in CheckpointStore.open(tmp_path).entries()] == before
    assert [(e.step, str(e.state), e.pinned, e.attempts) for e in store.entries()] == [
        (40, "quarantined", False, 0),
        (30, "committed", False, 1),
        (20, "committed", True, 0),
        (10, "verified", False, 0),
    ]


def test_a_load_that_something_outside_ended_is_not_held_against_the_checkpoint(tmp_path: Path) -> None:
    old, new = [commit(opened(tmp_path), step) for step in (10, 20)]

    def first_after(attempt: int, *, excused: set[int]) -> int:
        """Attempt ``attempt`` began to load the newest entry and ended; what does the next one begin with?"""
        store = CheckpointStore.open(tmp_path, attempt=attempt)
        store.fence()
        store.mark_attempted(store.index.current(new) or new)
        store = CheckpointStore.open(tmp_path, attempt=attempt + 1)
        store.fence()
        store.excuse(excused)
        return next(store.candidates()).step

    assert first_after(100, excused={100}) == new.step
    assert first_after(110, excused={110}) == new.step
    assert first_after(120, excused={120}) == old.step, "three excuses in a row are believed too often"
    store = CheckpointStore.open(tmp_path, attempt=130)
    store.fence()
    store.mark_verified(next(entry for entry in store.entries() if entry.step == new.step), by="resume")
    assert first_after(140, excused={7}) == old.step, "another attempt's excuse does not count"


def test_a_damaged_mark_counts_as_quarantine_but_never_as_verified(tmp_path: Path) -> None:
    store = opened(tmp_path)
    a, b = commit(store, 10), commit(store, 20)
    (store.path(a) / marks.VERIFIED).write_bytes(b"{tor")
    (store.path(b) / marks.QUARANTINED).write_bytes(b"")
    assert [str(entry.state) for entry in store.entries()] == ["quarantined", "committed"]


def test_entries_of_newer_releases_are_read_as_far_as_known(tmp_path: Path) -> None:
    entry = commit(opened(tmp_path), 10)
    assert Entry.from_json({**entry.to_json(), "colour": "blue"}) == entry
    with pytest.raises(ValueError, match="not a checkpoint entry"):
        Entry.from_json({"name": "x"})


def test_what_was_quarantined_is_not_resumed_from_though_the_head_was_not_told(tmp_path: Path) -> None:
    """The process that found it bad was killed between the mark and the head."""
    store = opened(tmp_path)
    good, bad = commit(store, 10), commit(store, 20)
    marks.put(Bench(tmp_path), store.path(bad), marks.QUARANTINED, {"reason": "loss differs", "by": "verification"})
    assert store.latest() == good
    assert opened(tmp_path, attempt=2).latest() == good


@pytest.mark.parametrize("where", ["announce", "confirm", "append"])
def test_a_quota_that_ends_exactly_at_the_index_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The payload was written and the pointer was not (Automodel#3390): the save fails cleanly, or it counts."""
    store = opened(tmp_path)
    old = commit(store, 10)
    real = os.write if where != "confirm" else os.replace

    def full(*given: object, **named: object) -> object:
        target = os.readlink(f"/proc/self/fd/{given[0]}") if where != "confirm" else str(given[1])
        wanted = {"announce": names.NEXT_HEAD, "confirm": names.HEAD, "append": names.HISTORY}[where]
        if wanted in os.path.basename(target):
            raise OSError(122, "Disk quota exceeded", target)
        return real(*given, **named)  # type: ignore[operator]

    monkeypatch.setattr(os, "write" if where != "confirm" else "replace", full)
    if where == "announce":
        with pytest.raises(OSError, match="quota"):
            commit(store, 20)
    else:
        commit(store, 20)
    monkeypatch.undo()
    expected = 10 if where == "announce" else 20
    for reader in (CheckpointStore.open(tmp_path), opened(tmp_path, attempt=2)):
        latest = reader.latest()
        assert latest is not None
        assert latest.step == expected
    again = commit(opened(tmp_path, attempt=3), 20)
    assert CheckpointStore.open(tmp_path).latest() == again
    assert old in CheckpointStore.open(tmp_path).entries()


def test_an_index_that_points_elsewhere_is_not_believed(tmp_path: Path) -> None:
    store = opened(tmp_path / "root")
    entry = commit(store, 10)
    shutil.copytree(store.path(entry), tmp_path / "elsewhere")
    evil = entry.with_marks(name="../elsewhere", step=99, attempt=99)
    (tmp_path / "root" / names.HEAD).write_bytes(sealed.seal({"v": 1, "entries": [evil.to_json()]}))
    assert store.latest() == entry


def test_saving_a_step_again_touches_nothing_that_is_visible(tmp_path: Path) -> None:
    """The old marker stayed while its shards were overwritten in place (VeOmni#1164, ezpz#196)."""
    store = opened(tmp_path)
    old = commit(store, 20, b"first")
    draft = store.begin(20)
    for at_work in ("empty", "half written"):
        if at_work == "half written":
            (draft.path / FILE).write_bytes(b"sec")
        latest = CheckpointStore.open(tmp_path).latest()
        assert latest == old
        assert verify(store.path(old), old) == []
        assert not draft.path.is_relative_to(store.path(old))
    store.abandon(draft)
    new = commit(store, 20, b"second")
    assert new.name != old.name
    assert [entry.name for entry in store.entries()] == sorted((old.name, new.name), reverse=True)
    assert verify(store.path(old), old) == verify(store.path(new), new) == []
