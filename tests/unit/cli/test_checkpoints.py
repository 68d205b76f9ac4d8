"""`slurm-resilience checkpoints …` says what is there, changes what it is told to, and ends with the documented code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from tests.unit.checkpoint.drafts import FILE, commit, opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = opened(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        commit(store, step, metrics={"loss": 40.0 - step}, extra={"samples": step})
    return tmp_path / "checkpoints"


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = ExitCode.OK) -> Any:
    assert main(["checkpoints", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], *words: str, code: int = ExitCode.OK) -> str:
    assert main(["checkpoints", *words]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def entries(root: Path) -> dict[int, Entry]:
    return {entry.step: entry for entry in CheckpointStore.open(root).entries()}


def damage(root: Path, step: int) -> None:
    (root / entries(root)[step].name / FILE).write_bytes(b"weighty")


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = document(capsys, "list", str(root.parent))
    assert [entry["step"] for entry in listed["checkpoints"]] == [30, 20, 10]
    assert listed["latest"] == listed["checkpoints"][0]["name"]
    assert listed["attempt"] == 1
    lines = text(capsys, "list", str(root)).splitlines()
    assert [line[0] for line in lines] == ["*", " ", " "]
    assert all("committed" in line for line in lines)


def test_list_shows_saves_that_have_not_ended_apart(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = opened(root).begin(40)
    listed = document(capsys, "list", str(root))
    assert listed["writing"] == [{"name": draft.name, "step": 40, "attempt": 1}]
    assert [entry["step"] for entry in listed["checkpoints"]] == [30, 20, 10]
    assert "does not count" in text(capsys, "list", str(root))


def test_show_finds_by_step_beginning_and_latest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = entries(root)[20].name
    for word in ("20", name, name[:15]):
        shown = document(capsys, "show", str(root), word, "--items")
        assert (shown["name"], shown["extra"], shown["items"][0]["tensor"]) == (name, {"samples": 20}, "weights")
    assert document(capsys, "show", str(root))["step"] == 30
    assert "samples" in text(capsys, "show", str(root), "20")


def test_names_that_mean_nothing_or_too_much_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entries(root)[20].name in text(capsys, "show", str(root), "99", code=ExitCode.BAD_CHECKPOINT)
    assert "More than one" in text(capsys, "pin", str(root), "step-", code=ExitCode.BAD_CHECKPOINT)


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [result["good"] for result in document(capsys, "verify", str(root), "--all")] == [True, True, True]
    damage(root, 30)
    (result,) = document(capsys, "verify", str(root), code=ExitCode.BAD_CHECKPOINT)
    assert result["problems"][0]["tensor"] == "weights"
    said = text(capsys, "verify", str(root), "10", "30", code=ExitCode.BAD_CHECKPOINT)
    assert "good" in said.splitlines()[0]
    assert "BAD" in said.splitlines()[1]
    assert entries(root)[30].usable
    text(capsys, "verify", str(root), "--quarantine", code=ExitCode.BAD_CHECKPOINT)
    assert "weights" in entries(root)[30].reason
    assert [result["step"] for result in document(capsys, "verify", str(root), "--all")] == [20, 10]


def test_rebuild(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / names.HEAD).write_bytes(b"lost")
    assert document(capsys, "rebuild", str(root), "--dry-run")["changed"] is True
    assert (root / names.HEAD).read_bytes() == b"lost"
    assert len(document(capsys, "rebuild", str(root))["after"]) == 3
    assert document(capsys, "rebuild", str(root))["changed"] is False
    assert "same before" in text(capsys, "rebuild", str(root))


def test_prune_says_first_and_does_then(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [gone["step"] for gone in document(capsys, "prune", str(root), "--keep-last", "1", "--dry-run")["removed"]] == [
        10,
        20,
    ]
    assert len(entries(root)) == 3
    text(capsys, "pin", str(root), "10")
    assert [gone["step"] for gone in document(capsys, "prune", str(root), "--keep-last", "1")["removed"]] == [20]
    assert "nothing to remove" in text(capsys, "prune", str(root), "--keep-last", "1")
    assert "makes no sense" in text(capsys, "prune", str(root), "--keep-last", "0", code=ExitCode.CONFIG_ERROR)


def test_pin_quarantine_release(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "pin", str(root), "20")["pinned"] is True
    assert "pinned" not in document(capsys, "pin", str(root), "20", "--off")
    said = document(capsys, "quarantine", str(root), "30", "--reason", "the loss jumped")
    assert (said["state"], said["reason"]) == ("quarantined", "the loss jumped")
    assert said["by"].startswith("user ")
    assert document(capsys, "list", str(root))["latest"] == entries(root)[20].name
    assert document(capsys, "release", str(root), "30")["state"] == "committed"
    assert document(capsys, "list", str(root))["latest"] == entries(root)[30].name
    history = [json.loads(line)["op"] for line in (root / names.HISTORY).read_text().splitlines()]
    assert history[-4:] == ["pinned", "unpin", "quarantined", "release"]


def test_a_folder_without_checkpoints_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no checkpoints" in text(capsys, "list", str(tmp_path), code=ExitCode.CONFIG_ERROR)
    assert "no directory" in text(capsys, "list", str(tmp_path / "nowhere"), code=ExitCode.CONFIG_ERROR)


def test_a_person_may_mark_while_a_newer_attempt_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(root, attempt=7)
    assert document(capsys, "quarantine", str(root), "30", "--reason", "x")["state"] == "quarantined"


def test_prune_keeps_the_best_either_way(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--keep-last", "1", "--best", "loss", "--dry-run")
    lowest = [gone["step"] for gone in document(capsys, "prune", str(root), *flags)["removed"]]
    highest = [gone["step"] for gone in document(capsys, "prune", str(root), *flags, "--best-is", "highest")["removed"]]
    assert lowest != highest
