"""`slurm-resilience checkpoints …` says what is there, changes what it is told to, and ends with the documented code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint import marks, names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.ownership import RootOfAnotherRun
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import main, progress
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
    assert "samples" in text(capsys, "show", str(root), "20", "--all")
    summary = text(capsys, "show", str(root), "20")
    assert "samples" not in summary
    assert {"name", "state", "step", "files", "tensors"} <= {line.partition(":")[0] for line in summary.splitlines()}
    assert len(summary) < 1000


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


def empty_manifest(root: Path, step: int) -> None:
    (root / entries(root)[step].name / names.MANIFEST).write_bytes(b"")


def test_what_is_bad_is_released_by_force_only(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(root, 30)
    text(capsys, "quarantine", str(root), "30", "--reason", "odd")
    said = text(capsys, "release", str(root), "30", code=ExitCode.BAD_CHECKPOINT)
    assert all(word in said for word in ("weights", "--force"))
    assert not entries(root)[30].usable
    assert document(capsys, "release", str(root), "30", "--force")["usable"] is True
    assert "released although" in text(capsys, "list", str(root))


def test_prune_counts_nothing_that_is_bad(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether somebody released it by force or nobody knows of it yet: the good ones stay."""
    damage(root, 30)
    text(capsys, "quarantine", str(root), "30", "--reason", "odd")
    text(capsys, "release", str(root), "30", "--force")
    assert [one["step"] for one in document(capsys, "prune", str(root), "--keep-last", "1", "--no-verify")["removed"]] == [10]
    commit(opened(root, attempt=2), 40)
    damage(root, 40)
    pruned = document(capsys, "prune", str(root), "--keep-last", "1")
    assert pruned["removed"] == []
    assert list(pruned["bad"]) == [entries(root)[40].name]
    assert "is bad and does not count" in text(capsys, "prune", str(root), "--keep-last", "1", "--dry-run")
    assert entries(root).keys() == {20, 30, 40}


def test_a_resume_that_verifies_it_takes_the_doubt_away(root: Path) -> None:
    store = opened(root, attempt=2)
    entry = store.release(entries(root)[30], doubt="one byte")
    assert entry.doubt == "one byte"
    assert store.mark_verified(entry, by="a run").doubt == ""
    store.release(entry, doubt="one byte")
    assert store.release(entry).doubt == ""
    assert not (root / entry.name / marks.DOUBTED).exists()


def test_an_entry_without_a_manifest_is_never_the_latest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_manifest(root, 30)
    for verb in ("show", "verify"):
        said = text(capsys, verb, str(root))
        assert f"{entries(root)[30].name} is newer and passed over" in said
        assert f"{entries(root)[20].name}" in said
    assert document(capsys, "list", str(root))["latest"] == entries(root)[20].name


def test_marks_on_an_entry_without_a_manifest_are_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_manifest(root, 30)
    assert "pinned" in text(capsys, "pin", str(root), "30")
    said = text(capsys, "quarantine", str(root), "30", "--reason", "the loss jumped")
    assert all(word in said for word in ("the loss jumped", "manifest", "pinned"))
    assert "is bad and is not released" in text(capsys, "release", str(root), "30", code=ExitCode.BAD_CHECKPOINT)
    assert "stays unusable" in text(capsys, "release", str(root), "30", "--force")


def test_verify_all_says_so_when_no_manifest_can_be_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        empty_manifest(root, step)
    found = document(capsys, "verify", str(root), "--all", code=ExitCode.BAD_CHECKPOINT)
    assert [one["good"] for one in found] == [False] * 3
    text(capsys, "verify", str(root), "--all", "--quarantine", code=ExitCode.BAD_CHECKPOINT)
    assert "no usable checkpoint" in text(capsys, "verify", str(root), "--all", code=ExitCode.BAD_CHECKPOINT)
    assert "all quarantined" in text(capsys, "show", str(root), code=ExitCode.BAD_CHECKPOINT)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prune", "--keep-last", "1", "--every-hours", "nan"], "every_hours"),
        (["prune", "--keep-last", "1", "--every-hours", "inf"], "every_hours"),
        (["prune", "--keep-last", "1", "--every-hours", "0"], "every_hours"),
        (["prune", "--keep-last", "1", "--every-steps", "0"], "every_steps"),
        (["prune", "--keep-last", "1", "--best", "nope"], "recorded are: loss"),
        (["verify", "--threads", "0"], "--threads 0"),
        (["verify", "--ranks", "0"], "--ranks 0"),
        (["release", "10", "--threads", "-1"], "--threads -1"),
        (["show", ""], "NAME is empty"),
        (["pin", " "], "NAME is empty"),
        (["quarantine", "10", "--reason", " "], "--reason is empty"),
        (["hand-over", "--to", "/nowhere"], "is no run's folder"),
    ],
)
def test_what_makes_no_sense_is_refused(root: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    before = sorted(path for path in root.rglob("*") if path.name != ".lock")
    assert says in text(capsys, words[0], str(root), *words[1:], code=ExitCode.CONFIG_ERROR)
    assert sorted(path for path in root.rglob("*") if path.name != ".lock") == before


@pytest.mark.parametrize("name", ["\u00b2", "\u0661", "9" * 5000, "-1", "\x1b[31m", "\udcff"])
def test_no_odd_name_means_a_checkpoint(root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = text(capsys, "pin", str(root), "--", name, code=ExitCode.BAD_CHECKPOINT)
    assert "No checkpoint" in said
    assert "\x1b" not in said
    assert len(said) < 1500


def test_what_a_terminal_would_obey_is_not_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text(capsys, "quarantine", str(root), "30", "--reason", "red \x1b[31m\r\nand \ud800 long " + "x" * 5000)
    for verb in (["list"], ["show", "30"], ["quarantine", "30", "--reason", "\x1b]0;\x07"]):
        said = text(capsys, verb[0], str(root), *verb[1:])
        assert not [one for one in said if not one.isprintable() and one != "\n"]
        assert max(map(len, said.splitlines())) < 1500


def test_rebuild_of_what_holds_nothing_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        empty_manifest(root, step)
    (root / names.HEAD).write_bytes(b"")
    said = text(capsys, "rebuild", str(root), "--dry-run")
    assert "would name: nothing, there is no usable checkpoint" in said
    assert "before: there was none that can be believed" in said
    text(capsys, "rebuild", str(root))
    assert "the same before" in text(capsys, "rebuild", str(root), "--dry-run")


def test_a_path_that_no_file_system_takes_is_no_traceback(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "could not go on" in text(capsys, "list", "x" * 5000, code=ExitCode.BAD_CHECKPOINT)
    (root / names.HISTORY).unlink()
    (root / names.GONE).write_bytes(b"")
    assert "FileExistsError" in text(capsys, "prune", str(root), "--keep-last", "1", code=ExitCode.BAD_CHECKPOINT)
    assert len(entries(root)) == 3


def test_hand_over_to_a_run_that_was_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared"
    commit(opened(shared, attempt=7, run_id="alpha"), 10)
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"v": 1, "run_id": "beta", "created": 0.0}))
    with pytest.raises(RootOfAnotherRun):
        opened(shared, attempt=1, run_id="beta")
    told = document(capsys, "hand-over", str(shared), "--to", str(other))
    assert (told["before"], told["run_id"], told["attempt"]) == ("alpha", "beta", 7)
    assert (other / "attempt").read_text() == "7\n"
    taken = opened(shared, attempt=8, run_id="beta")
    commit(taken, 5)
    assert [entry.step for entry in taken.candidates()] == [5, 10]
    with pytest.raises(RootOfAnotherRun):
        opened(shared, attempt=9, run_id="alpha")
    assert document(capsys, "list", str(shared))["run_id"] == "beta"


def test_pruning_says_how_many_are_gone(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def watched(label: str, total: int, count: Callable[[], int]) -> Iterator[None]:
        seen.append((label, total, count()))
        yield
        seen.append(count())

    monkeypatch.setattr(progress, "of_count", watched)
    text(capsys, "prune", str(root), "--keep-last", "1")
    assert seen == [("checkpoints removed", 2, 0), 2]


def test_an_ending_that_names_no_format_is_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "export", str(root), "-o", str(tmp_path / "x.bin")]) == ExitCode.CONFIG_ERROR
    assert ".safetensors or .pt" in capsys.readouterr().err
    assert not (tmp_path / "x.bin").exists()


def test_force_replaces_files_only(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = tmp_path / "null.pt"  # a link, so that a failure costs nobody his /dev/null
    device.symlink_to("/dev/null")
    assert main(["checkpoints", "export", str(root), "-o", str(device), "--force"]) == ExitCode.CONFIG_ERROR
    said = capsys.readouterr().err
    assert "is there already" in said
    assert "--force" not in said
    assert device.is_symlink()
