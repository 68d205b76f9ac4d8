"""Each framework, the real one: a rank is killed, and the losses are those of the run that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.integrations import frameworks

STEPS = 60
BATCH = ("--global-batch", "32", "--set", "micro_batch=8")
# name, options, whether the last bits may differ (the framework's own word on what it repeats)
FRAMEWORKS = [
    pytest.param("accelerate", (), id="accelerate"),
    pytest.param("lightning", BATCH, id="lightning", marks=pytest.mark.long),
    pytest.param("transformers", (), id="transformers", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "options"), FRAMEWORKS)
@pytest.mark.timeout(900)
def test_a_killed_rank_changes_nothing(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path.parent  # frameworks put their paths into URLs and globs
    paced = ("--checkpoint-every", "10", *options)
    left_alone, killed = folder / "left-alone", folder / "killed"
    with frameworks.started(left_alone, name, STEPS, *paced) as calm, frameworks.started(killed, name, STEPS, *paced) as child:
        frameworks.kill_a_rank_after(child, killed, 10)
        frameworks.finished(child, killed)
        frameworks.finished(calm, left_alone)
    (fault,) = frameworks.events(killed, "fault_detected")
    assert (fault["cause"], fault["rank"]) == ("rank_crash", 1)
    (resumed,) = frameworks.events(killed, "resumed")
    assert resumed["step"] >= 10
    assert frameworks.events(killed, "run_completed")[0]["step"] == STEPS
    expected, measured = frameworks.losses(left_alone), frameworks.losses(killed)
    assert len(expected) == STEPS
    assert measured == pytest.approx(expected, rel=1e-6)
