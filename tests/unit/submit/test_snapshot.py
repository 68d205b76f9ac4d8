"""The code as it was when the job was submitted: what is copied, what is linked, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.prepare import Work
from slurm_resilience.submit.snapshot import Source, next_place, take
from tests.unit.submit.test_submission import Queue

pytestmark = pytest.mark.filterwarnings("ignore:.*local to each node")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a package in src/, data that git ignores, a change that is not committed, and runs inside of it."""
    folder = tmp_path_factory.mktemp("it's a project")
    write(folder, {
        "train.py": "from helper import WORD\nprint(WORD, open('data/set.txt').read())\n",
        "src/helper.py": "WORD = 'committed'\n",
        "gone.py": "", "data/set.txt": "samples", "tools/__pycache__/x.pyc": "x", ".gitignore": "data/\n__pycache__\n",
        "resilience-runs/old/checkpoints/step-5": "heavy",
    })  # fmt: skip
    git(folder, "init")
    git(folder, "add", ".gitignore", "train.py", "src", "gone.py")
    git(folder, "commit", "-m", "first")
    (folder / "gone.py").unlink()
    write(folder, {"src/helper.py": "WORD = 'as it is now'\n", "new.py": "not yet added"})
    return folder


def files_in(folder: Path) -> set[str]:
    out = set()
    for place, folders, names in os.walk(folder):
        out |= {str((Path(place) / name).relative_to(folder)) for name in [*folders, *names]}
    return out


def test_what_git_knows_is_copied_and_the_rest_is_linked(project: Path) -> None:
    run_dir = project / "resilience-runs" / "mine"
    place = next_place(run_dir)
    take(Source.of(project), place)
    assert files_in(place) == {".gitignore", "train.py", "src", "src/helper.py", "new.py", "data", "tools", "resilience-runs"}
    assert {name for name in files_in(place) if (place / name).is_symlink()} == {"data", "tools", "resilience-runs"}
    assert (place / "src" / "helper.py").read_text() == "WORD = 'as it is now'\n"
    assert (place / "data" / "set.txt").read_text() == "samples"
    assert not os.stat(place / "train.py").st_mode & 0o222
    about = json.loads((run_dir / "code.json").read_text())
    assert (about["source"], about["files"], about["changed"], len(about["commit"])) == (str(project), 4, True, 40)
    assert next_place(run_dir) == run_dir / "code-2", "submitted again, with newer code"


def test_a_later_attempt_runs_what_the_first_one_ran(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project / "src"))
    source = Source.of(project)
    place = project / "resilience-runs" / "mine" / "code"
    take(source, place)
    write(project, {"src/helper.py": "WORD = 'edited since'\n", "train.py": "raise SystemExit('edited since')\n"})
    for command in (["train.py"], source.command([sys.executable, str(project / "train.py")], place)[1:]):
        lines = "\n".join([*source.lines(place), f'"{sys.executable}" "{command[0]}"'])
        done = subprocess.run(["bash", "-euc", lines], capture_output=True, text=True, check=False)
        assert done.stdout == "as it is now samples\n", done.stderr


def test_without_git_hidden_folders_and_environments_are_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plain")
    write(folder, {"a.py": "a", "pkg/b.py": "b", ".secret/key": "k", "venv/pyvenv.cfg": "", "venv/lib/big.py": "x" * 1000})
    (folder / "link").symlink_to("a.py")
    place = folder / "run" / "code"
    take(Source.of(folder / "pkg"), folder / "run2" / "code")
    take(Source.of(folder), place)
    assert {"a.py", "pkg", "pkg/b.py", "link"} <= files_in(place)
    assert os.readlink(place / "link") == "a.py"
    assert (place / "venv").is_symlink()
    assert not (place / "run").exists(), "the run's own folder is not in it"
    assert files_in(folder / "run2" / "code") == {"b.py"}


def test_too_much_is_refused_before_anything_is_copied(project: Path) -> None:
    write(project, {"weights.bin": "x" * 5000})
    place = project / "runs" / "mine" / "code"
    with pytest.raises(ConfigError, match=r"too much for a snapshot.*weights\.bin.*\.gitignore"):
        take(Source.of(project), place, most_bytes=4000)
    with pytest.raises(ConfigError, match="5 files"):
        take(Source.of(project), place, most_files=2)
    assert not place.parent.exists()


def test_nonsense(tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match="no code in"):
        take(Source.of(empty), empty / "run" / "code")
    with pytest.raises(ConfigError, match="There is no folder"):
        Source.of(empty / "nowhere")


def test_a_submission_with_a_snapshot(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "sbatch").write_text("#!/bin/sh\nexit 99\n")
    (project / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(project / "src")
    queue = Queue()
    executor = ResilientExecutor(project / "resilience-runs", client=queue, snapshot=True)
    job = executor.submit_work(Work(command=("python", str(project / "train.py"))))
    code = job.run_dir / "code"
    assert f"cd -- '{code}/src'".replace("it's", "it'\"'\"'s") in queue.scripts[0]
    assert "/code/train.py" in queue.scripts[0].partition("command=(")[2].partition("\n")[0]
    two = executor.submit_works([Work(command=("python", "a.py"))] * 2)
    assert (two[0].run_dir.parent / "code" / "src" / "helper.py").exists(), "one for the whole array"
    assert not (two[0].run_dir / "code").exists()
    shown = executor.script(project / "resilience-runs" / "shown", Work(command=("python", "a.py")))
    assert "/shown/code/src" in shown
    assert not (project / "resilience-runs" / "shown").exists(), "a dry run writes nothing"
