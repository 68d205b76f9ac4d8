"""The timeline: what is painted over later is what lies there, and costs what is repainted rather than the whole run."""

from __future__ import annotations

import random
import time

from slurm_resilience.observe.timeline import DOWN, LOST, SAVING, TRAINING, Timeline


def test_painting_changes_the_training_in_between_and_tells_how_much() -> None:
    draw = random.Random(1)
    for _ in range(200):
        line = Timeline()
        at = 0
        for _ in range(12):
            line.begin(at, draw.choice([TRAINING, TRAINING, DOWN, SAVING]))
            at += draw.randint(0, 3)
        line.begin(at, DOWN)
        seconds = [kind for span in line.spans for kind in [span.kind] * int(span.end - span.start)]
        since, until = sorted((draw.randint(-1, at + 1), draw.randint(-1, at + 1)))
        painted = line.paint(since, until, LOST)
        expected = [LOST if kind == TRAINING and since <= n < until else kind for n, kind in enumerate(seconds)]
        assert [kind for span in line.spans for kind in [span.kind] * int(span.end - span.start)] == expected
        assert painted == expected.count(LOST) == line.total(LOST)


def test_a_long_run_is_repainted_at_its_end_only() -> None:
    line = Timeline()
    began = time.process_time()
    for n in range(30_000):
        line.begin(n, TRAINING)
        line.begin(n + 0.9, DOWN)
        line.paint(n + 0.5, n + 0.9, LOST)
    assert time.process_time() - began < 10, "was 0.1 s; minutes where each painting goes through the whole run"
    assert abs(line.total(LOST) - 12_000) < 1e-3
