"""kill -9 of everybody, one after the other, in one run on pretend nodes; on a real Slurm: tests/slurm/test_faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.checker import check
from tests.faults.nemesis import Nemesis, draw
from tests.faults.trial import KEEP_LAST, LocalRun, torment

EVERYBODY = [(kind, here) for kind in ("rank", "launcher", "agent") for here in (True, False)] + [("supervisor", True)]
SPACING = 12


@pytest.mark.long  # the same on a real Slurm is always tried
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.timeout(900)
def test_kill_everybody(seed: int, tmp_path: Path) -> None:
    faults = draw(seed, EVERYBODY, first_step=7, spacing=SPACING)
    total = faults[-1].step + SPACING
    run_dir = tmp_path / "run"
    with LocalRun(run_dir, total) as run:
        history = torment(run_dir, faults, Nemesis(run_dir, "n1"), ended=run.ended, say=run.say)
        assert run.code() == 0, run.say()
    assert len(history.faults) == len(EVERYBODY)
    assert check(history, total_steps=total, keep_last=KEEP_LAST) == []
