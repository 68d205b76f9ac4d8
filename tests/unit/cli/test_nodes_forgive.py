"""`nodes forgive`: a node that a run leaves out is taken back by its user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.events import EventWriter, read_for_standing
from slurm_resilience.observe.standing import Standing
from slurm_resilience.runtime import forgiveness


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """n2 crashed twice, and the third attempt does without it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"v": 1, "run_id": "r-1", "argv": ["x"], "config": {}}))
    writer = EventWriter(folder, restart=0)
    writer.write("allocation_started", nodes=["n1", "n2"], job_id="7")
    for node in ("n1", "n2"):
        writer.write("agent_joined", node=node, warm=True)
    for attempt in (1, 2):
        writer.attempt = attempt
        writer.write("attempt_started", nodes=["n1", "n2"], world=2, plan={})
        writer.write("attempt_stopped", cause="rank_crash", node="n2", fault=True, detail="killed by SIGSEGV")
    writer.attempt = 3
    reason = "1 node (at least 1); n2 is left out: 2 crashes began there, and none elsewhere"
    writer.write("decided", action="launch", reason=reason)
    writer.write("attempt_started", nodes=["n1"], world=1, plan={})
    writer.close()
    return folder


def test_the_wish_is_left_for_the_supervisor(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "forgive", str(run_dir), "n2", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["forgiven"] == "2 crashes began there, and none elsewhere"
    assert forgiveness.heard(run_dir) == ["n2"]


def test_a_node_that_is_no_suspect_and_one_that_is_none(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "forgive", str(run_dir), "n1"]) == ExitCode.OK
    assert "n1 is no suspect" in capsys.readouterr().out
    assert main(["nodes", "forgive", str(run_dir), "n3"]) == ExitCode.CONFIG_ERROR
    assert "has no node 'n3'" in capsys.readouterr().err
    assert forgiveness.heard(run_dir) == []


def test_where_nothing_runs(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["nodes", "forgive", str(tmp_path / "empty"), "n1"]) == ExitCode.CONFIG_ERROR
    assert "There is no run in" in capsys.readouterr().err
    writer = EventWriter(run_dir, restart=0)
    writer.write("allocation_started", nodes=["n1", "n2"], job_id="1")
    assert main(["nodes", "forgive", str(run_dir), "n2"]) == ExitCode.OK
    assert "from its next launch on" in capsys.readouterr().out
    writer.write("run_failed", cause="cancelled", reason="somebody", exit_code=86)
    assert main(["nodes", "forgive", str(run_dir), "n2"]) == ExitCode.OK
    assert "when it is started again" in capsys.readouterr().out


def test_why_it_is_left_out_stands_on_every_screen(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "left out: 2 crashes began there, and none elsewhere"
    assert Standing.of(read_for_standing(run_dir)).nodes["n2"].why == why
    assert main(["status", str(run_dir)]) == ExitCode.OK
    assert why in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(run_dir), "-o", str(tmp_path / "r.html")]) == ExitCode.OK
    assert why in (tmp_path / "r.html").read_text()
