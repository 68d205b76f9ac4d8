"""Options of the user's command never become ours: after ``--`` all is the command's, without it nothing is guessed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from slurm_resilience import cli
from slurm_resilience.errors import ExitCode


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == ExitCode.USAGE
    return capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("ours", "command"),
    [
        ("run --local 2", "python train.py --global-batch 64"),
        ("run --local=2 --cold", "python train.py --log x"),
        ("submit --dry-run --nodes 2", "python train.py --time 5"),
        ("submit -p low --snapshot . --exclusive --nodes 2", "python -u train.py"),
        ("submit --dry-run --exclusive", "ls train.py"),
        ("sandbox exec --name nosuch", "ls -l"),
        ("checkpoints verify --deep DIR", "python train.py --ranks 3"),
    ],
)
def test_without_the_dashes_an_option_after_the_command_is_refused(
    ours: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*ours.split(), *command.split()], capsys)
    assert f"put `--` before the command: `slurm-resilience {ours} -- {command}`" in said


def test_with_the_dashes_or_without_options_it_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--", sys.executable, "nope.py", "--local", "0", "--global-batch", "64"], [sys.executable, "nope.py"]):
        assert cli.main(["run", "--local", "2", *words]) == ExitCode.CONFIG_ERROR
        assert "There is no script 'nope.py'" in capsys.readouterr().err


def test_an_unknown_option_before_the_command_is_still_called_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown option '--lr'" in refused(["run", "--lr", "1", "python", "--cold"], capsys)
    assert "--args='--lr 1'" in refused(["rehearse", "train.py", "--lr", "1"], capsys)
    late = ["checkpoints", "verify", "DIR", "--deep", "--ranks", "2", "--", "python", "train.py"]
    assert "put all options before" in refused(late, capsys)


@pytest.mark.parametrize("number", ["0", "-1"])
def test_to_play_no_nodes_makes_no_sense(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--local", number, "--", "true"]) == ExitCode.CONFIG_ERROR
    assert "it needs 1 or more" in capsys.readouterr().err


def test_a_folder_in_place_of_an_action_is_meant_to_be_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "`slurm-resilience checkpoints list ./first`" in refused(["checkpoints", "./first"], capsys)
    assert "is a folder, and an ACTION is needed" in refused(["checkpoints", str(tmp_path)], capsys)
    assert "did you mean 'list'" in refused(["checkpoints", "lst"], capsys)


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, on a machine that has Python and no sbatch."""
    (tmp_path / "bin").mkdir()
    os.symlink(sys.executable, tmp_path / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    assert shutil.which("sbatch") is None
    return tmp_path


def test_a_dry_run_needs_no_slurm_and_says_what_it_did_not_ask(no_slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--nodes", "2-4", "--global-batch", "48", "--set", "limits.step_s=60", "--"]
    assert cli.main([words[0], "--dry-run", *words[1:], "python", "trian.py"]) == ExitCode.OK
    out = capsys.readouterr()
    assert out.out.startswith("#!/bin/bash")
    assert "python trian.py" in out.out
    assert "Slurm was not asked" in out.err
    assert f"the script 'trian.py' is not there as seen from here: {no_slurm / 'trian.py'}" in out.err
    assert "config.yaml in the run folder would hold nodes=[2, 4], global_batch=48, limits.step_s=60.0, and" in out.err
    assert cli.main([*words, "python", "-c", "0"]) == ExitCode.LAUNCH_FAILED
    said = capsys.readouterr().err
    assert "`slurm-resilience run --local K -- CMD`" in said
    assert "templates render" in said
    assert [path.name for path in no_slurm.iterdir()] == ["bin"]
