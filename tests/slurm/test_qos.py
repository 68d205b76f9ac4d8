"""Preemption by quality of service, as most sites have it: the grace time is the QOS's, and no partition says a word of it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.sandbox import Sandbox
from tests.slurm.test_matrix import Cell

pytestmark = pytest.mark.long

SETTINGS = {
    "PreemptType": "preempt/qos", "PreemptMode": "REQUEUE", "low.PreemptMode": "OFF", "low.GraceTime": "0",
    "AccountingStorageEnforce": "associations,limits,qos",
}  # fmt: skip
ACCOUNTS = """
sacctmgr -i add account lab
sacctmgr -i add qos scavenge set gracetime=15 preemptmode={mode} priority=1
sacctmgr -i add qos urgent set preempt=scavenge priority=100
sacctmgr -i add user alice account=lab qos=scavenge,urgent defaultqos=scavenge
"""


@pytest.fixture(params=["requeue", "cancel"], scope="module")
def by_qos(request: pytest.FixtureRequest, machine_can: None) -> Iterator[Sandbox]:
    """Four nodes on which the partitions preempt nobody; a sandbox of its own, since accounts outlive a heal."""
    running = Sandbox.up(nodes=4, name="qos", settings=SETTINGS)
    done = running.exec(["bash", "-euc", ACCOUNTS.format(mode=request.param)], root=True)
    assert done.returncode == 0, done.stderr
    yield running
    running.down()


@pytest.fixture
def home(by_qos: Sandbox) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-qos-"))
    shutil.chown(folder, "alice")
    folder.chmod(0o755)
    yield folder
    by_qos.exec(["scancel", "--user=alice"])
    by_qos.wait_for(lambda: not by_qos.exec(["squeue", "--noheader"]).stdout, 150, what="An empty queue")
    shutil.rmtree(folder, ignore_errors=True)


class QosCell(Cell):
    """Its own QOS is alice's default one."""

    def preempt(self, seconds: float = 3) -> None:
        nodes = self.nodes()
        argv = ["sbatch", "--qos=urgent", "--partition=high", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}",
                "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds:g}"]  # fmt: skip
        self.sandbox.exec(argv, check=True)


def test_a_job_of_a_preemptable_qos_comes_back(by_qos: Sandbox, home: Path) -> None:
    cell = QosCell(by_qos, home, "four")
    cell.until("checkpoint_committed", count=2)
    cell.preempt()
    cell.comes_back()
    (why,) = cell.events("warning_explained")
    assert why["cause"] == "preemption"
    assert cell.slurm("QOS") == "scavenge"
    said = cell.end()
    assert (said["state"], said["cause"], said["exit_code"]) == ("COMPLETED", None, 0), said
    assert said["attempts"][0].get("cause") == "preemption"


def test_doctor_tells_the_grace_of_the_qos(by_qos: Sandbox, home: Path) -> None:
    mode = by_qos.exec(["sacctmgr", "--noheader", "show", "qos", "scavenge", "format=preemptmode"], check=True).stdout.strip()
    done = by_qos.exec(["slurm-resilience", "doctor", "--partition", "low"], cwd=home)
    said = " ".join(done.stdout.split())
    assert re.search(r"By the QOS scavenge: [^.]*15 s of grace", said), said
    assert "QOS urgent" not in said, "nothing preempts that one"
    assert ("PreemptMode=REQUEUE" in said, done.returncode) == ((True, 78) if mode == "cancel" else (False, 0)), said
