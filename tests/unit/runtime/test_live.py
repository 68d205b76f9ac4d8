"""The live view: every rank that lives, with its step and the age of its last beat; written now and then."""

from __future__ import annotations

from typing import Any

from slurm_resilience.runtime import inputs as i
from tests.unit.runtime.stage import Stage


def views(stage: Stage) -> list[dict[str, Any]]:
    return [output.document for output in stage.outputs if isinstance(output, i.WriteLive)]


def test_every_rank_is_in_it_under_its_node() -> None:
    stage = Stage().running()
    stage.pass_(10)
    newest = views(stage)[-1]
    assert newest["attempt"] == 1
    assert {node: [seen["rank"] for seen in ranks] for node, ranks in newest["nodes"].items()} == stage.live_ranks
    assert all(set(seen) == {"rank", "step", "phase", "age_s"} for ranks in newest["nodes"].values() for seen in ranks)
    assert newest["t"] <= stage.clock.time()


def test_it_is_written_every_two_seconds_not_with_every_beat() -> None:
    stage = Stage().running()
    before = len(views(stage))
    stage.pass_(10)
    assert 4 <= len(views(stage)) - before <= 6


def test_a_rank_that_has_ended_is_not_in_it() -> None:
    stage = Stage().running()
    stage.pass_(5)
    stage.finish_ranks("n2")
    stage.pass_(3)
    assert "n2" not in views(stage)[-1]["nodes"]
    assert "n1" in views(stage)[-1]["nodes"]
