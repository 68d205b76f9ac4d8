"""Each framework on a real Slurm, as the ordinary user: a rank is killed, the job is preempted, and no loss is another one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_resilience.sandbox import Sandbox
from tests.slurm.test_templates import Submit, ends_well, events, submit, survive
from tests.unit.integrations import frameworks

__all__ = ["submit"]  # a fixture

STEPS = 240
BATCH = "--global-batch 32 --set micro_batch=8"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "options"), [("accelerate", ""), ("lightning", BATCH), ("transformers", "")])
def test_it_survives_and_loses_nothing(
    name: str, options: str, sandbox: Sandbox, shared: Path, submit: Submit, tmp_path: Path
) -> None:
    options = f"{options} --checkpoint-every 10".strip()
    alone = tmp_path.parent / "alone"  # frameworks put their paths into URLs and globs
    with frameworks.started(alone, name, STEPS, *options.split()) as calm:
        frameworks.finished(calm, alone)
    example = frameworks.EXAMPLES / f"with_{name}.py"
    command = f"{sys.executable} {example} --steps {STEPS} --sleep 0.4"
    job, run_dir = submit("multi-node", command=command, nodes="2", ranks_per_node="1", options=options)
    steps = survive(sandbox, shared, job, run_dir)
    assert 0 < steps[0] < steps[1]
    ends_well(sandbox, shared, job, within=300)
    assert len(events(run_dir, "started_fresh")) == 1
    expected, measured = frameworks.losses(alone), frameworks.losses(run_dir)
    assert len(expected) == STEPS
    assert measured == pytest.approx(expected, rel=1e-6)
