from __future__ import annotations

import json
import math
from pathlib import Path

from slurm_resilience.training.metrics import FILE_NAME, MetricsFile, history


def line(step: int, attempt: int, loss: float) -> dict[str, float]:
    return {"step": step, "attempt": attempt, "loss": loss}


def test_the_newest_attempt_has_the_last_word_on_a_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for one in (line(1, 1, 0.9), line(2, 1, 0.8), line(3, 1, 0.7), line(2, 2, 0.85), line(3, 2, 0.75)):
        file.write(one)
    file.close()
    assert {step: entry["loss"] for step, entry in history(tmp_path).items()} == {1: 0.9, 2: 0.85, 3: 0.75}
    assert list(history(tmp_path, up_to_step=2)) == [1, 2]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'{"step": 1, "attempt": 1}\n{"step": 2, "att')
    file = MetricsFile(tmp_path)
    file.write(line(3, 2, 0.5))
    assert list(history(tmp_path)) == [1, 3]


def test_values_that_are_not_finite_stay_readable(tmp_path: Path) -> None:
    MetricsFile(tmp_path).write(line(1, 1, math.nan))
    raw = (tmp_path / FILE_NAME).read_text()
    json.loads(raw, parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))
    assert math.isnan(float(history(tmp_path)[1]["loss"]))


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert history(tmp_path) == {}
