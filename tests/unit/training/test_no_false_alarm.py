"""Two hundred honest resumes, with every check on, and not one checkpoint is condemned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.observe.events import read_events

from . import programs
from .worlds import start

KINDS = [("one", 1), ("one-bf16", 1), ("ddp", 2), ("ddp-bf16", 2), ("fsdp", 2), ("fsdp-bf16", 3), ("ddp", 3)]
EACH = 29  # of seven kinds: 203


def hold(folder: Path, said: dict[str, Any], resumes: int) -> None:
    """Every resume took the newest checkpoint, and each step that was taken twice gave the same loss, bit by bit."""
    assert said["starts"][0] == 0
    assert len(said["starts"]) == resumes + 1
    assert said["rejected"] == []
    assert {verdict for _, verdict in said["verdicts"]} == {"passed"}
    assert {"probe loss", "loss of the next batch", "samples consumed of train by arithmetic"} <= {
        n for n, _ in said["verdicts"]
    }
    replayed = 0
    for before, after in zip(said["loss"], said["loss"][1:], strict=False):
        twice = before.keys() & after.keys()
        assert {step: before[step] for step in twice} == {step: after[step] for step in twice}
        replayed += len(twice)
    assert replayed == resumes
    assert [entry for entry in CheckpointStore.open(folder / "checkpoints").entries() if not entry.usable] == []
    told = [event for event in read_events(folder) if event["event"] in ("first_steps_checked", "node_suspected")]
    assert told == []


def test_a_few(tmp_path: Path) -> None:
    for kind in ("one", "one-bf16"):
        hold(tmp_path / kind, programs.honest(kind, str(tmp_path / kind), 4), 4)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "ranks"), KINDS, ids=[f"{kind}-{ranks}" for kind, ranks in KINDS])
def test_two_hundred(tmp_path: Path, kind: str, ranks: int) -> None:
    for said in start(ranks, programs.honest, kind, str(tmp_path / "run"), EACH).results(within_s=1500):
        hold(tmp_path / "run", said, EACH)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("ddp", (2, 3, 2, 4)),
        ("fsdp", (2, 3, 2, 4)),
        ("fsdp-bf16", (2, 3, 2, 4)),
        ("hsdp", (4, 2, 4)),
        ("tp", (2, 4, 2)),
        ("tp_fsdp", (4, 2, 4)),
    ],
)
def test_on_other_worlds(tmp_path: Path, kind: str, worlds: tuple[int, ...]) -> None:
    """Each world takes over what another one has left, and comes back to its own twice."""
    for ranks in worlds:
        for said in start(ranks, programs.honest, kind, str(tmp_path), 2).results(within_s=600):
            assert said["rejected"] == []
    assert [entry for entry in CheckpointStore.open(tmp_path / "checkpoints").entries() if not entry.usable] == []
