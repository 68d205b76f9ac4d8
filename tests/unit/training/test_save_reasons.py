"""What is told of a save: why it failed, also where the error has no words, and the numbers that retention goes by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.integrations import file_saver
from slurm_resilience.training.passed_over import MOST_TOLD, tell_passed_over
from slurm_resilience.training.saving import Saver, in_words
from tests.unit.checkpoint.drafts import commit, opened


class Heard:
    def __init__(self) -> None:
        self.facts: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> bool:
        self.facts.append((kind, fields))
        return True


@pytest.mark.parametrize(
    ("error", "says"),
    [(TimeoutError(), "TimeoutError()"), (OSError("  "), "OSError('  ')"), (ValueError("no room"), "no room"), (None, "None")],
)
def test_a_failure_without_words_is_named_by_its_kind(error: BaseException | None, says: str) -> None:
    assert in_words(error) == says


def test_a_failed_save_tells_why_though_the_error_does_not() -> None:
    saver, heard = object.__new__(Saver), Heard()
    saver._link, saver._world = heard, type("Alone", (), {"rank": 0})()  # type: ignore[assignment]
    saver._failed(7, TimeoutError())
    assert heard.facts == [("checkpoint_failed", {"step": 7, "error": "TimeoutError()"})]


def test_whole_numbers_are_kept_with_a_checkpoint(tmp_path: Path) -> None:
    saver = object.__new__(Saver)
    saver._store = CheckpointStore.open(tmp_path, retention=Retention(best="accuracy"))
    assert saver._kept_metrics({"loss": 3, "accuracy": 71, "lr": 0.1}) == {"loss": 3, "accuracy": 71}
    for odd in (True, "1", math.nan, math.inf, 10**400, None):
        assert saver._kept_metrics({"loss": odd}) == {}
        assert not file_saver._is_number(odd)
    assert file_saver._is_number(3)


def test_newer_checkpoints_that_were_passed_over_are_told_by_rank_0(tmp_path: Path) -> None:
    store = opened(tmp_path)
    good, *newer = [commit(store, step) for step in range(10, 14)]
    (store.path(newer[0]) / "manifest.json").write_bytes(b"")
    store.mark_attempted(newer[1])
    store.quarantine(newer[2], "told when it happened", by="test")
    heard = Heard()
    tell_passed_over(store, heard, good, leads=False)  # type: ignore[arg-type]
    assert heard.facts == []
    tell_passed_over(store, heard, good, leads=True)  # type: ignore[arg-type]
    told = [(kind, fields["step"]) for kind, fields in heard.facts]
    assert told == [("checkpoint_passed_over", 12), ("checkpoint_passed_over", 11)]
    assert "loading it" in heard.facts[0][1]["reason"]
    assert "manifest" in heard.facts[1][1]["reason"]


def test_not_all_of_very_many_are_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    entries = [commit(store, step) for step in range(MOST_TOLD + 5)]
    for entry in entries[1:]:
        (store.path(entry) / "manifest.json").unlink()
    heard = Heard()
    tell_passed_over(store, heard, entries[0], leads=True)  # type: ignore[arg-type]
    assert len(heard.facts) == MOST_TOLD
