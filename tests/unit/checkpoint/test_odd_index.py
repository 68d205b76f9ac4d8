"""What nobody of us wrote: heads, manifests and marks of odd shape, directories where files belong.  Said, never raised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint import marks, names, sealed
from slurm_resilience.checkpoint.entry import Entry, State
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.index import BY_SCAN
from slurm_resilience.checkpoint.manifest import Manifest
from slurm_resilience.checkpoint.marking import MOST_REASON_CHARS
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from tests.unit.checkpoint.drafts import commit, opened

GOOD = {"name": "step-00000010-a00001-00000000", "step": 10, "attempt": 1, "world": 1, "bytes": 1, "manifest_sha256": "x"}
ODD_HEADS: list[Any] = [
    [], "head", 7, None, {"v": "1"}, {"v": None}, {"v": 1}, {"v": 1, "entries": 7}, {"v": 1, "entries": {"a": 1}},
    {"v": 1, "entries": [7]}, {"v": 1, "entries": [None]}, {"v": 1, "entries": [[]]},
    *({"v": 1, "entries": [{**GOOD, name: odd}]} for name, odd in {
        "step": "10", "attempt": 2, "world": None, "bytes": -1, "metrics": [], "mesh": 3, "committed_at": "now",
        "attempts": "x", "name": 7, "state": "fine", "manifest_sha256": {}, "reason": [],
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize("name", [names.HEAD, names.NEXT_HEAD])
@pytest.mark.parametrize("body", ODD_HEADS, ids=repr)
def test_a_sealed_head_of_odd_shape_is_not_believed(tmp_path: Path, body: Any, name: str) -> None:
    entry = commit(opened(tmp_path), 10)
    (tmp_path / name).write_bytes(sealed.seal(body))
    assert CheckpointStore.open(tmp_path).latest() == entry


def test_sealed_nonsense_is_broken_not_raised() -> None:
    for raw in (b'{"$float":[]}', b'{"$float":"x"}', b"[" * 100_000):
        good = sealed.seal("x")
        digest = hashlib.sha256(raw).hexdigest().encode()
        with pytest.raises(sealed.Broken):
            sealed.unseal(good[: good.index(b'"x"')] + raw + b',"sha256":"' + digest + b'"}\n')


@pytest.mark.parametrize("name", [names.HEAD, names.NEXT_HEAD])
def test_a_directory_in_the_heads_place_is_put_aside(tmp_path: Path, name: str) -> None:
    store = opened(tmp_path)
    for step in (10, 20, 30):
        commit(store, step)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("years of work")
    person = CheckpointStore.open(tmp_path)
    assert [entry.step for entry in person.rebuild()] == [30, 20, 10]
    assert [entry.step for entry in person.prune(Retention(keep_last=1), wait=True)] == [10, 20]
    assert (tmp_path / names.HEAD).is_file()
    assert [path.read_text() for path in tmp_path.glob(".aside-*/thesis.txt")] == ["years of work"]


def test_a_directory_in_a_marks_place_counts_as_set_and_can_be_dropped(tmp_path: Path) -> None:
    entry = commit(opened(tmp_path), 10)
    (tmp_path / entry.name / marks.QUARANTINED).mkdir()
    person = CheckpointStore.open(tmp_path)
    (found,) = person.entries()
    assert (found.state, found.reason) == (State.QUARANTINED, "its quarantine mark is damaged")
    assert person.release(found).usable


@pytest.mark.parametrize("raw", [b"null", b"", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_quarantine_still_holds(tmp_path: Path, raw: bytes) -> None:
    store = opened(tmp_path)
    entry = commit(store, 10)
    (tmp_path / store.quarantine(entry, "bad", by="test").name / marks.QUARANTINED).write_bytes(raw)
    assert CheckpointStore.open(tmp_path).latest() is None


def test_loads_of_odd_shape_are_blamed_and_can_be_excused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    entry = commit(store, 10)
    (tmp_path / entry.name / marks.ATTEMPTED).write_text(json.dumps({"begun": [1, "x", {}], "excused": [[], 1]}))
    assert store.entries()[0].attempts == 1
    store.excuse({1})
    assert store.entries()[0].attempts == 0
    assert store.latest() == entry


@pytest.mark.parametrize("raw", [b"", b"torn", bytes(100)], ids=["empty", "torn", "zeros"])
def test_the_head_does_not_vouch_for_a_manifest_that_is_not_whole(tmp_path: Path, raw: bytes) -> None:
    store = opened(tmp_path)
    older, newest = commit(store, 10), commit(store, 20)
    reader = CheckpointStore.open(tmp_path)
    assert reader.latest() == newest  # also once it has been read
    (tmp_path / newest.name / names.MANIFEST).write_bytes(raw)
    assert reader.latest() == older
    assert CheckpointStore.open(tmp_path).latest() == older
    ((passed, reason),) = reader.passed_over(older)
    assert (passed.name, "manifest" in reason) == (newest.name, True)


def test_the_head_does_not_vouch_for_another_ones_manifest(tmp_path: Path) -> None:
    store = opened(tmp_path)
    older, newest = commit(store, 10), commit(store, 20)
    (tmp_path / newest.name / names.MANIFEST).write_bytes((tmp_path / older.name / names.MANIFEST).read_bytes())
    assert CheckpointStore.open(tmp_path).latest() == older


def test_marks_on_an_entry_without_a_manifest_are_seen(tmp_path: Path) -> None:
    store = opened(tmp_path)
    commit(store, 10)
    (tmp_path / commit(store, 20).name / names.MANIFEST).write_bytes(b"")
    (broken,) = (entry for entry in store.entries() if entry.step == 20)
    assert (broken.by, broken.readable) == (BY_SCAN, False)
    assert store.pin(broken).pinned
    told = store.quarantine(broken, "the loss jumped", by="somebody")
    assert (told.by, told.pinned) == ("somebody", True)
    assert "the loss jumped" in told.reason
    assert "manifest" in told.reason
    released = store.release(broken)
    assert (released.usable, released.by, released.pinned) == (False, BY_SCAN, True)


def test_a_reason_that_fills_pages_is_cut(tmp_path: Path) -> None:
    store = opened(tmp_path)
    told = store.quarantine(commit(store, 10), "x" * 5000, by="test")
    assert len(told.reason) == MOST_REASON_CHARS + 1


def sealed_manifest(**odd: Any) -> bytes:
    entry = {**GOOD, "manifest_sha256": ""}
    item = ["w", "f", 0, 4, 0, 4, "0" * 16]
    body = {"v": 1, "entry": entry, "files": {"f": {"bytes": 4}}, "items": [item], "tensors": {}, "extra": {}}
    return sealed.seal({**body, "content": {}, "versions": {}, **odd})


ODD_MANIFESTS: list[dict[str, Any]] = [
    {"v": "1"}, {"entry": []}, {"entry": {}}, {"files": []}, {"files": {"f": 4}}, {"files": {"f": {}}},
    {"files": {"../f": {"bytes": 4}}},
    {"files": {"f": {"bytes": "4"}}}, {"files": {"f": {"bytes": 3}}}, {"items": 7}, {"items": [7]}, {"items": [[]]},
    {"items": [["w", "f", 0, 4, 0, 4, None]]}, {"items": [["w", "f", -1, 4, 0, 4, ""]]},
    {"items": [["w", "g", 0, 4, 0, 4, ""]]},
    {"items": [["w", "f", 0, 4, 0, 1 << 70, ""]]}, {"items": [["w", "f", 0, 4, 0, 4, "", "", "F", 3]]},
    {"tensors": []}, {"tensors": {"w": 1}}, {"extra": 1}, {"content": None}, {"versions": []},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_MANIFESTS, ids=repr)
def test_a_sealed_manifest_of_odd_shape_is_corrupt(odd: dict[str, Any]) -> None:
    Manifest.from_bytes(sealed_manifest(), "it")
    with pytest.raises(CorruptCheckpoint):
        Manifest.from_bytes(sealed_manifest(**odd), "it")


def test_an_entry_survives_its_own_round_trip() -> None:
    entry = Entry(**GOOD, mesh={"dp": 2}, metrics={"loss": 1}, doubt="bad", pinned=True)
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
