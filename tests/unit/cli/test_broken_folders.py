"""A run folder in which something is not what it should be: one sentence that names it, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.events import EventWriter

COMMANDS = ["status", "events", "events --incidents", "explain", "report", "logs", "plan replay", "requeue --dry-run"]
MARK = "this is no JSON ["


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    writer = EventWriter(tmp_path, restart=0)
    writer.write("run_started", run_id="r-1", argv=["x"])
    writer.write("allocation_started", nodes=["n1"], job_id="local")
    writer.close()
    (tmp_path / "run.json").write_text(json.dumps({"v": 1, "run_id": "r-1", "argv": ["x"]}))
    for name in ("job.json", "live.json", "state.json", "supervisor.json", "metrics.jsonl", "pulse"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def broken(path: Path, how: str) -> None:
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to("/nowhere/at/all")
    else:
        path.write_text(MARK)


@pytest.mark.parametrize("how", ["folder", "dangling", "garbage"])
@pytest.mark.parametrize(
    "name", ["events.jsonl", "run.json", "job.json", "live.json", "supervisor.json", "metrics.jsonl", "pulse"]
)
def test_no_command_ends_in_a_traceback(run_dir: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken(run_dir / name, how)
    for command in COMMANDS:
        words = [*command.split(), str(run_dir)]
        words += ["--output", str(run_dir / "report.html")] if command == "report" else []
        code = main(words)  # raises what would be a traceback
        said = capsys.readouterr().err
        assert code == ExitCode.OK or said.startswith(f"slurm-resilience {words[0]}"), (command, code, said)


@pytest.mark.parametrize(
    ("name", "how", "command", "said"),
    [
        ("events.jsonl", "folder", "status", "events.jsonl is a folder, and a file is needed there"),
        ("events.jsonl", "folder", "explain", "events.jsonl is a folder, and a file is needed there"),
        ("events.jsonl", "dangling", "events", "has not started yet, so there are no events"),
        ("run.json", "garbage", "status", "run.json is damaged: it is not JSON"),
        ("run.json", "folder", "status", "run.json is a folder"),
        ("job.json", "garbage", "requeue", "job.json is damaged"),
    ],
)
def test_the_error_names_what_is_wrong(
    run_dir: Path, name: str, how: str, command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(run_dir / name, how)
    assert main([command, str(run_dir)]) == ExitCode.CONFIG_ERROR
    assert said in capsys.readouterr().err


def test_a_view_that_cannot_be_read_costs_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken(run_dir / "live.json", "folder")
    assert main(["status", str(run_dir)]) == ExitCode.OK
    assert "r-1" in capsys.readouterr().out
