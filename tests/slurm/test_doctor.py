"""The doctor before a real cluster: silent on a good one, and one finding for each setting that is bad on purpose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.sandbox import Sandbox
from tests.slurm.conftest import _own_name

# finding, what makes it, and words that its evidence or the forecast must hold
BAD: list[tuple[str, dict[str, str], str]] = [
    ("preempt-cancel", {"low.PreemptMode": "CANCEL"}, "PreemptMode=CANCEL"),
    ("preempt-suspend", {"PreemptMode": "SUSPEND,GANG", "low.PreemptMode": "SUSPEND"}, "PreemptMode=SUSPEND"),
    ("save-does-not-fit", {"low.GraceTime": "0", "KillWait": "5"}, "KillWait=5"),
    ("slurmd-timeout", {"SlurmdTimeout": "0"}, "SlurmdTimeout=0"),
    ("job-requeue", {"JobRequeue": "0"}, "JobRequeue=0"),
    ("requeueexit", {"RequeueExit": "80"}, "80 (APP_ERROR)"),
    ("min-job-age", {"MinJobAge": "10"}, "MinJobAge=10"),
    ("proctrack", {"ProctrackType": "proctrack/pgid"}, "proctrack/pgid"),
    ("scheduler-pace", {"SchedulerParameters": "bf_interval=300"}, "bf_interval=300"),
    ("partition-state", {"low.State": "DRAIN"}, "State=DRAIN"),
]


@pytest.fixture(scope="module")
def cluster(machine_can: None) -> Iterator[Sandbox]:
    """One of its own: its settings are changed for every test."""
    with _own_name() as name:
        running = Sandbox.up(nodes=1, name=name)
        yield running
        running.down()


def doctor(cluster: Sandbox, *words: str) -> tuple[int, dict[str, Any]]:
    """What it says to an ordinary user."""
    done = cluster.exec(
        [sys.executable, "-m", "slurm_resilience", "doctor", "--partition", "low", "--json", *words], timeout=120
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def alarms(document: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in document["findings"] if finding["level"] != "note"]


def test_silent_on_a_good_cluster_and_says_what_will_happen(cluster: Sandbox) -> None:
    Sandbox.up(nodes=1, name=cluster.layout.name)
    code, document = doctor(cluster)
    assert (code, alarms(document)) == (0, [])
    told = {forecast["event"]: forecast for forecast in document["forecasts"]}
    assert told["preemption"]["seconds"]["save_s"] == 15 + 10 - 4  # GraceTime and KillWait of the sandbox
    assert told["node_lost"]["seconds"]["slurm_notices_s"] == 413
    assert set(told) == {"preemption", "time_limit", "node_lost", "prolog_failure"}


@pytest.mark.parametrize(("name", "settings", "words"), BAD, ids=[name for name, _, _ in BAD])
def test_each_bad_setting_is_found(cluster: Sandbox, name: str, settings: dict[str, str], words: str) -> None:
    Sandbox.up(nodes=1, name=cluster.layout.name, settings=settings)
    code, document = doctor(cluster)
    assert alarms(document) == [name]
    (finding,) = (finding for finding in document["findings"] if finding["name"] == name)
    assert words in finding["evidence"]
    assert code == (78 if finding["level"] == "danger" else 0)


def test_a_save_that_is_too_long_for_this_cluster(cluster: Sandbox) -> None:
    Sandbox.up(nodes=1, name=cluster.layout.name)
    assert alarms(doctor(cluster, "--save-seconds", "10")[1]) == []
    assert alarms(doctor(cluster, "--save-seconds", "60")[1]) == ["save-does-not-fit"]


def test_a_requeued_job_is_held_back_by_a_long_credential(cluster: Sandbox) -> None:
    Sandbox.up(nodes=1, name=cluster.layout.name, settings={"AuthInfo.cred_expire": "600"})
    assert doctor(cluster)[1]["forecasts"][0]["seconds"]["slurm_alone_s"] == 601


def test_for_people_with_a_script(cluster: Sandbox, tmp_path: Path) -> None:
    Sandbox.up(nodes=1, name=cluster.layout.name)
    script = Path("/tmp") / f"doctor-{cluster.layout.name}.sh"
    script.write_text("#!/bin/bash\n#SBATCH --partition=low --requeue --open-mode=append --signal=USR2@30\nsrun hostname\n")
    try:
        words = ["doctor", "--script", str(script)]
        done = cluster.exec([sys.executable, "-m", "slurm_resilience", *words], timeout=120)
    finally:
        script.unlink()
    said = " ".join(done.stdout.split())
    assert done.returncode == 78
    assert "Slurm ends the whole job when one of its nodes dies" in said
    assert "30 s before it" in said
    unknown = cluster.exec([sys.executable, "-m", "slurm_resilience", "doctor", "--partition", "lo"], timeout=120)
    assert unknown.returncode == 78
    assert "did you mean 'low'" in unknown.stderr


def test_without_accounting(machine_can: None) -> None:
    with _own_name() as name:
        running = Sandbox.up(nodes=1, name=name, accounting=False)
        try:
            assert alarms(doctor(running)[1]) == ["accounting"]
        finally:
            running.down()
