"""What the doctor reads in a batch script, and what it tries in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.checkpoint.filesystem import FileSystem
from slurm_resilience.doctor import folder, script
from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.templates import template_path

GOOD = """#!/bin/bash
# a comment
#SBATCH --nodes=2-4 --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append   # why
#SBATCH --signal=USR2@120
#SBATCH -J "my job" -t 01:00:00

srun hostname
#SBATCH --no-requeue
"""


def names(text: str) -> list[str]:
    return [finding.name for finding in script.of_options(script.options(text), "x.sh")]


def test_the_options_as_sbatch_reads_them() -> None:
    assert script.options(GOOD) == {
        "nodes": "2-4", "requeue": "", "no-kill": "", "open-mode": "append", "signal": "USR2@120",
        "job-name": "my job", "time": "01:00:00",
    }  # fmt: skip
    assert script.lead_s(script.options(GOOD)) == 120
    assert script.lead_s({}) is None
    assert script.lead_s({"signal": "TERM"}) == 60  # Source: sbatch(1), the default of --signal


def test_our_own_template_and_a_good_script_have_no_finding() -> None:
    assert names(GOOD) == []
    assert names(template_path().read_text()) == []


@pytest.mark.parametrize(
    ("replaced", "by", "finding"),
    [
        (" --requeue", "", "script-no-requeue"),
        ("#SBATCH --no-kill\n", "", "script-dies-with-a-node"),
        ("--open-mode=append", "--open-mode=truncate", "script-truncates-log"),
        ("#SBATCH --signal=USR2@120\n", "", "script-no-warning"),
        ("USR2@120", "B:USR2@120", "script-warns-the-shell"),
        ("--requeue", "--requeue --ntasks-per-node=1", "script-fixes-tasks"),
    ],
)
def test_what_a_script_lacks(replaced: str, by: str, finding: str) -> None:
    assert replaced in GOOD
    assert names(GOOD.replace(replaced, by, 1)) == [finding]


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        script.read(tmp_path / "nothing.sh")


@pytest.mark.parametrize(
    ("kind", "options", "finding"),
    [
        ("tmpfs", "rw", "folder-in-memory"),
        ("ext4", "rw", "folder-local"),
        ("nfs4", "rw,vers=4.2", None),
        ("nfs", "rw,vers=3,nolock", "folder-local"),
        ("lustre", "rw,flock", None),
        ("lustre", "rw,localflock", "folder-local"),
        ("lustre", "rw", "no-locks"),
        ("gpfs", "rw", None),
        ("fuse.sshfs", "rw", "locks-unknown"),
    ],
)
def test_kinds_of_file_systems(kind: str, options: str, finding: str | None) -> None:
    found = folder.of_kind(FileSystem(kind, "/x", frozenset(options.split(","))), Path("/x/runs"))
    assert [one.name for one in found] == ([finding] if finding else [])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert [one.name for one in folder.check(Path("/proc/nothing/here"))] == ["folder-not-writable"]


def test_trying_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    for finding in folder.check(tmp_path / "not" / "yet"):
        assert finding.name in ("folder-local", "folder-in-memory", "little-room", "locks-unknown")
    assert list(tmp_path.iterdir()) == []
