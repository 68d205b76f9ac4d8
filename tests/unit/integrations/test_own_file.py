"""A script that knows nothing of us: it never starts from scratch, and never from half a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import ConfigError
from slurm_resilience.integrations.own_file import arguments, command
from slurm_resilience.observe.events import read_events

# Saves straight over its only file.  In its first life it dies in the middle of the sixth save, which destroys that file;
# in its second it fails before it has saved anything; in its third it gets to the end.
SCRIPT = """
import os, signal, sys, time
path, resume = sys.argv[1], sys.argv[2:]
first = os.environ["RANK"] == "0"  # another rank may look when rank 0 is writing already
count = int(open(path).read().strip("x")) if first and os.path.exists(path) else 0
assert path == os.environ["RESILIENCE_CHECKPOINT_FILE"]
print("rank", os.environ["RANK"], "begins at", count, flush=True)
if not first:
    with open("others", "a") as file:
        file.write("x")
    while not os.path.exists("over"):
        time.sleep(0.02)
    sys.exit(0)
assert bool(resume) == bool(count), (resume, count)
lives = len(os.listdir("lives"))
open(f"lives/{lives}", "w").write(str(count))
# a resume is one once both ranks have said so, and a life counts for the other one too
while lives < 2 and (not os.path.exists("others") or len(open("others").read()) < lives + 1):
    time.sleep(0.02)
if lives == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while count < 12:
    count += 1
    with open(path, "w") as file:
        file.write("x" * 5000)
        file.flush()
        if count == 6 and lives == 0:
            time.sleep(1)  # whoever copies now copies half a file
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(str(count))
    deadline = time.monotonic() + 200
    while max([int(name[5:13]) for name in os.listdir(os.environ["RESILIENCE_CHECKPOINTS"]) if name.startswith("step-")],
              default=0) < count and count < 12 and time.monotonic() < deadline:
        time.sleep(0.02)
open("over", "w")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "lives").mkdir()
    return tmp_path


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slurm_resilience", "run", "--local", "1", "--ranks-per-node", "2", "--run-dir", "run"]
    argv += ["--set", "preload=[]", "--checkpoint-file", "last.pt", "--resume-with", "--resume {checkpoint}", *options]
    argv += ["--", sys.executable, "script.py", "{checkpoint}"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=400, check=False)


def test_it_goes_on_from_its_last_whole_save(folder: Path) -> None:
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(folder / "lives" / str(life)).read_text() for life in range(3)] == ["0", "5", "5"]
    events = read_events(folder / "run")
    assert [event["step"] for event in events if event["event"] == "resumed"] == [5, 5]
    store = CheckpointStore.open(folder / "run" / "checkpoints")
    newest = next(iter(store.candidates()))
    assert newest.step == 12, "what it wrote last, right before its end, is kept too"
    assert (store.path(newest) / "files" / "last.pt").read_text().strip("x") == "12"

    # and when none is whole any more, it does not begin again
    for path in (folder / "run" / "checkpoints").glob("step-*/files/last.pt"):
        path.write_text("something else")
    (folder / "run" / "state.json").unlink()
    (folder / "over").unlink()
    done = run(folder)
    assert done.returncode == 84, done.stdout + done.stderr
    assert len(list((folder / "lives").iterdir())) == 3, "the script was not started"


def test_what_begins_as_an_archive_and_has_no_end_is_refused(folder: Path) -> None:
    """A writer that nobody sees (another process, say): torch's own format still tells half from whole."""
    (folder / "script.py").write_text(
        "import os, subprocess, sys, time\nif os.environ['RANK'] == '0':\n"
        "    subprocess.run(['sh', '-c', 'printf \"PK\\\\003\\\\004 and no more\" > \"$1\"', 'sh', sys.argv[1]], check=True)\n"
        "    time.sleep(1)\n"
    )
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    failed = [event for event in read_events(folder / "run") if event["event"] == "checkpoint_failed"]
    assert len(failed) == 1
    assert "only a part of a checkpoint" in failed[0]["error"]


def test_a_save_into_a_file_of_the_same_name_elsewhere_is_told_once(folder: Path) -> None:
    """As PyTorch's own tutorial does: the path is fixed in the script."""
    (folder / "last.pt").write_text("of last week")
    (folder / "script.py").write_text(
        "import os, time\n"
        "over = time.monotonic() + 1  # the file is looked at four times a second\n"
        "while os.environ['RANK'] == '0' and time.monotonic() < over:\n"
        "    open('last.pt', 'w').write(str(time.monotonic()))\n"
    )
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(folder / "run")
    (failed,) = [event for event in events if event["event"] == "checkpoint_failed"]
    assert f"The script saves into {folder / 'last.pt'}" in failed["error"]
    assert "RESILIENCE_CHECKPOINT_FILE" in failed["error"]
    assert not [event for event in events if event["event"] == "checkpoint_committed"]


def test_an_old_file_of_the_same_name_elsewhere_is_nobodys_matter(folder: Path) -> None:
    (folder / "last.pt").write_text("of last week")
    (folder / "script.py").write_text("")
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [event for event in read_events(folder / "run") if event["event"] == "checkpoint_failed"]


@pytest.mark.parametrize(
    ("argv", "name", "match"),
    [
        (["python", "x.py"], "a/b", "without a folder"),
        (["python", "x.py"], "..", "without a folder"),
        (["./train"], "a", "Python programs only"),
        (["torchrun", "x.py"], "a", "without torchrun"),
    ],
)
def test_nonsense_is_refused(argv: list[str], name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        command(argv, name)


def test_words() -> None:
    whole = command(["python", "-u", "t.py", "a b"], "s.pt", "--resume {checkpoint}")
    assert whole[:4] == ("python", "-u", "-m", "slurm_resilience.integrations.own_file")
    assert arguments(["p", "{checkpoint}"], "--from {checkpoint}", "/x y", resumes=True) == ["p", "/x y", "--from", "/x y"]
    assert arguments(["p", "--s={checkpoint}"], "--from", "/x", resumes=False) == ["p", "--s=/x"]
    assert json.dumps(whole)
    assert os.path.basename(whole[0]) == "python"
