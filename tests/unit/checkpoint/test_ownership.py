"""A checkpoint root belongs to one run: another one is refused before it touches anything, a copy belongs to who opens it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.ownership import CLAIM, Ownership, RootOfAnotherRun
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, ConfigError, ExitCode, Fenced
from tests.unit.checkpoint.drafts import commit, opened


def everything(root: Path) -> dict[str, bytes]:
    files = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    return {str(name): path.read_bytes() for name, path in files.items()}


@pytest.mark.parametrize("attempt", [1, 2, 9])
def test_another_run_is_refused_and_touches_nothing(tmp_path: Path, attempt: int) -> None:
    first = opened(tmp_path, attempt=2, run_id="alpha")
    entry = commit(first, 10)
    draft = first.begin(20)
    before = everything(tmp_path)
    with pytest.raises(RootOfAnotherRun, match="belong to another run") as caught:
        opened(tmp_path, attempt=attempt, run_id="beta")
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == ExitCode.CONFIG_ERROR
    assert all(word in str(caught.value) for word in ("alpha", "beta", "checkpoint.dir", "hand-over"))
    assert everything(tmp_path) == before
    assert draft.path.is_dir()
    first.abandon(draft)
    assert commit(first, 30) == first.latest()
    assert [found.step for found in first.candidates()] == [30, entry.step]


def test_the_same_run_comes_back_with_newer_attempts(tmp_path: Path) -> None:
    commit(opened(tmp_path, attempt=1, run_id="alpha"), 10)
    again = opened(tmp_path, attempt=2, run_id="alpha")
    commit(again, 20)
    opened(tmp_path, attempt=2, run_id="alpha")
    assert [entry.step for entry in again.candidates()] == [20, 10]
    assert Ownership(tmp_path).owner() == "alpha"
    assert again.fence_token.owner()["run_id"] == "alpha"


def test_a_root_without_an_owner_is_adopted_by_the_first_that_has_a_name(tmp_path: Path) -> None:
    """An older release, or somebody who used the store by itself, has left it so."""
    commit(opened(tmp_path, attempt=1), 10)
    assert Ownership(tmp_path).owner() == ""
    adopted = opened(tmp_path, attempt=2, run_id="alpha")
    assert [entry.step for entry in adopted.candidates()] == [10]
    with pytest.raises(RootOfAnotherRun):
        opened(tmp_path, attempt=3, run_id="beta")
    opened(tmp_path, attempt=3)  # without a name, the number alone decides, as ever


def test_a_leftover_does_not_adopt_a_root(tmp_path: Path) -> None:
    opened(tmp_path, attempt=5)
    with pytest.raises(Fenced):
        opened(tmp_path, attempt=4, run_id="alpha")
    assert Ownership(tmp_path).owner() == ""


def test_a_copy_belongs_to_whoever_opens_it(tmp_path: Path) -> None:
    commit(opened(tmp_path / "one", attempt=1, run_id="alpha"), 10)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second = opened(tmp_path / "two", attempt=1, run_id="beta")
    assert [entry.step for entry in second.candidates()] == [10]
    assert (Ownership(tmp_path / "one").owner(), Ownership(tmp_path / "two").owner()) == ("alpha", "beta")
    with pytest.raises(RootOfAnotherRun):
        opened(tmp_path / "two", attempt=2, run_id="alpha")


def test_a_root_that_was_moved_is_still_its_runs(tmp_path: Path) -> None:
    opened(tmp_path / "one", run_id="alpha")
    os.rename(tmp_path / "one", tmp_path / "two")
    with pytest.raises(RootOfAnotherRun):
        opened(tmp_path / "two", run_id="beta")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": 7}', b"[" * 100_000, b"\xff"])
def test_a_damaged_claim_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    opened(tmp_path, run_id="alpha")
    (tmp_path / names.FENCE / CLAIM).write_bytes(damage)
    opened(tmp_path, run_id="alpha")
    assert json.loads((tmp_path / names.FENCE / CLAIM).read_bytes())["run_id"] == "alpha"


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    gate = threading.Barrier(8)
    got: list[str] = []
    refused: list[str] = []

    def come(name: str) -> None:
        ownership = Ownership(tmp_path)
        gate.wait()
        try:
            ownership.claim(name)
        except RootOfAnotherRun:
            refused.append(name)
        else:
            got.append(name)

    threads = [threading.Thread(target=come, args=(f"run-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (got, len(refused)) == ([Ownership(tmp_path).owner()], 7)
    assert os.listdir(tmp_path / names.FENCE) == [CLAIM]


def test_a_fence_that_is_no_folder_is_said_and_nothing_is_believed(tmp_path: Path) -> None:
    commit(opened(tmp_path), 10)
    shutil.rmtree(tmp_path / names.FENCE)
    (tmp_path / names.FENCE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="which attempt owns"):
        CheckpointStore.open(tmp_path).newest_attempt()
