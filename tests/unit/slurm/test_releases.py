"""What releases of Slurm other than the sandbox's have answered on real clusters (recorded/public, each with its source).

We read text only.  The JSON recordings hold the words of states as those releases spell them, which text has joined by "+".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.slurm.nodeset import expand
from slurm_resilience.slurm.records import NodeRecord, parse_config
from slurm_resilience.slurm.states import JobState, parse_state

PUBLIC = Path(__file__).parent / "recorded" / "public"
JSON = sorted(path.name for path in PUBLIC.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((PUBLIC / name).read_text())
    return document


def test_every_recording_names_its_source() -> None:
    table = (PUBLIC / "SOURCES.md").read_text()
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `([^`]+)` \|.*$", table, re.MULTILINE)}
    assert sorted(rows) == sorted(path.name for path in PUBLIC.iterdir() if path.name != "SOURCES.md")
    for name, row in rows.items():
        assert re.search(r"\| [\w-]+/[\w-]+, `[\w./-]+`, [0-9a-f]{12} \|$", row), name


@pytest.mark.parametrize("name", JSON)
def test_the_release_in_the_name_is_the_one_in_the_answer(name: str) -> None:
    meta = load(name)["meta"]
    release = (meta.get("slurm") or meta.get("Slurm"))["release"]
    assert release.startswith(name.partition("-")[2].removesuffix(".json"))


def test_the_configuration_of_20_11() -> None:
    found = parse_config((PUBLIC / "config-20.11.txt").read_text())
    assert found["SLURM_VERSION"] == "20.11.6"
    assert found["AccountingStorageBackupHost"] == ""
    assert found["UnkillableStepTimeout"] == "120 sec"
    assert "Cgroup Support Configuration:" not in found
    assert found["AllowedRAMSpace"] == "100.0%"


def test_a_node_of_21_08() -> None:
    """`scontrol -o` prints the same lines as one."""
    node = NodeRecord.parse(" ".join((PUBLIC / "node-21.08.txt").read_text().splitlines()))
    assert (node.name, node.base, node.flags) == ("c2180", "IDLE", frozenset())
    assert node.usable
    assert node.boot_at is not None
    assert node.fields["Version"] == "21.08.8-2"
    assert node.fields["OS"].endswith("UTC 2021")
    assert node.fields["CfgTRES"] == "cpu=28,mem=500G,billing=728,gres/gpu=7"
    assert node.fields["RealMemory"] == "512000"


@pytest.mark.parametrize(
    ("name", "lost", "drained", "usable"),
    [("node-23.02.json", False, True, False), ("node-24.05.json", False, False, True), ("node-24.11.json", True, True, False)],
)
def test_states_of_nodes(name: str, lost: bool, drained: bool, usable: bool) -> None:
    (node,) = load(name)["nodes"]
    record = NodeRecord.parse(f"NodeName={node['name']} State={'+'.join(node['state'])} Reason={node['reason']}")
    assert (record.lost, record.drained, record.usable) == (lost, drained, usable)
    assert record.reason == node["reason"]


@pytest.mark.parametrize("name", [name for name in JSON if not name.startswith("node")])
def test_states_of_jobs(name: str) -> None:
    (job,) = load(name)["jobs"]
    state = job.get("job_state") or job["state"]["current"]
    assert parse_state(state if isinstance(state, str) else ",".join(state)) is JobState.RUNNING
    assert len(expand(job["nodes"])) == (16 if "[" in job["nodes"] else 1)
