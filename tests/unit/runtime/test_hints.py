"""What ended on a node is told to root's checks there, on that node, once; and to nobody where nobody wants to know."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from slurm_resilience.errors import Cause
from slurm_resilience.hooks import hints, world
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.hint_desk import HintDesk
from slurm_resilience.runtime.hint_writer import PLACE, leave_hint
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.states import State
from tests.unit.runtime.stage import Clock, Stage

AT = 1_800_000_000.25


def leave(box: Path, node: str = "n1", **environ: str) -> str:
    told = {PLACE: str(box), "SLURM_JOB_ID": "12", **environ}
    return leave_hint(node, cause="hang", attempt=3, at=AT, environ=told)


def test_what_a_job_leaves_is_what_root_reads(tmp_path: Path) -> None:
    box = Path(hints.prepare(str(tmp_path / "box"), "n1"))
    assert leave(tmp_path / "box") == ""
    (left,) = box.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    assert json.loads(left.read_text()) == {"v": 1, "node": "n1", "cause": "hang", "attempt": 3, "at": AT, "job": 12}
    here = world.World("test", "n1", {"hints": {"box": str(tmp_path / "box")}}, str(tmp_path), {}, 10.0)
    assert hints.collect(here) == [
        {"cause": "hang", "uid": os.getuid(), "hinted_job": 12, "hinted_attempt": 3, "hinted_at": AT}
    ]


def test_where_there_is_no_box_there_is_nobody_to_tell(tmp_path: Path) -> None:
    assert leave(tmp_path / "none") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_a_box_that_is_not_roots_gets_nothing(tmp_path: Path) -> None:
    box = tmp_path / "box" / "n1"
    box.mkdir(parents=True)
    os.chown(box, 2001, 2001)
    assert "not root's" in leave(tmp_path / "box")
    assert list(box.iterdir()) == []


def test_a_box_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "n1").write_text("no folder")
    assert "Not a directory" in leave(tmp_path)


def told(stage: Stage, node: str) -> list[tuple[int, str]]:
    return [(hint.attempt, hint.cause) for hint in stage.agents[node].hints]


def test_the_agent_of_the_node_is_told_what_ended_there() -> None:
    stage = Stage(3).running()
    stage.kill_rank("n2")
    stage.until(State.RUNNING)
    assert told(stage, "n2") == [(1, "rank_crash")]
    assert told(stage, "n1") == []


def test_only_what_a_node_can_be_to_blame_for_is_told() -> None:
    out = Outbox(Clock(), History(), restart=0, attempt=4)
    desk = HintDesk(out)
    for cause in Cause:
        desk.blame("n1", 7, cause, AT)
    desk.blame("", 7, Cause.HANG, AT)
    said = {each.message.cause for each in out.take() if isinstance(each, i.Send) and isinstance(each.message, m.Hint)}
    assert said == {"rank_crash", "hang", "oom", "node_lost", "launch_failed"}


def test_a_node_that_was_lost_is_told_when_it_is_back() -> None:
    stage = Stage(3, nodes=(2, 3)).running()
    stage.power_off("n2")
    stage.pass_(10)
    assert told(stage, "n1") == []
    agent = stage.join("n2")
    assert [hint.cause for hint in agent.hints] == ["node_lost"]
    stage.join("n2")
    assert m.Hint(1, "node_lost", agent.hints[0].at) == agent.hints[0]
