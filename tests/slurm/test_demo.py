"""`bash examples/demo.sh` ends with DEMO OK: the whole loop, as a newcomer sees it."""

from __future__ import annotations

import subprocess

import pytest

from tests.faults.trial import ROOT


@pytest.mark.parametrize("options", [[], pytest.param(["--local"], marks=pytest.mark.long)], ids=["slurm", "local"])
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("machine_can")
def test_the_demo_is_ok(options: list[str]) -> None:
    command = ["bash", str(ROOT / "examples" / "demo.sh"), "--steps", "120", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.strip().splitlines()[-1].startswith("DEMO OK  n4 lost -> first step on 3 nodes ")
