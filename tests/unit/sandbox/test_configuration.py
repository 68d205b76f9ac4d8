"""slurm.conf as on record, settings that win, scripts that do what they say when they are run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.sandbox.configuration import (
    Cluster,
    hook_script,
    settings_from,
    slurm_conf,
    slurmdbd_conf,
    wrapper_script,
)
from slurm_resilience.sandbox.layout import Layout

GOLDEN = Path(__file__).with_name("golden") / "slurm.conf"
LAYOUT = Layout("golden")


def conf(**settings: object) -> dict[str, str]:
    """Key -> value of slurm.conf with these settings; the partitions under their names."""
    values = {key.replace("__", "."): value for key, value in settings.items()}
    text = slurm_conf(LAYOUT, Cluster(nodes=2, settings=settings_from(values)))
    out = {}
    for line in text.splitlines():
        if line.startswith("PartitionName="):
            name, _, rest = line.removeprefix("PartitionName=").partition(" ")
            out[name] = f" {rest} "
        elif not line.startswith("#"):
            key, _, value = line.partition("=")
            assert key == "NodeName" or key not in out, f"{key} stands there twice"
            out[key] = value
    return out


def test_slurm_conf_is_the_one_on_record() -> None:
    assert slurm_conf(LAYOUT, Cluster(nodes=2)) == GOLDEN.read_text(), (
        "if the change is meant: write the new text to tests/unit/sandbox/golden/slurm.conf"
    )


def test_a_setting_wins_over_ours_whatever_its_case() -> None:
    assert conf()["SlurmdTimeout"] == "300"
    assert conf(slurmdtimeout=20)["SlurmdTimeout"] == "20"
    assert conf(Prolog="/my/prolog")["Prolog"] == "/my/prolog"


def test_partition_settings() -> None:
    assert " GraceTime=15 " in conf()["low"]
    assert " GraceTime=0 " in conf(GraceTime=0)["low"]
    assert "GraceTime" not in conf(GraceTime=0)["high"]
    assert " MaxTime=10 " in conf(high__maxtime=10)["high"]
    assert " MaxTime=INFINITE " in conf(high__maxtime=10)["low"]


def test_the_low_partition_follows_the_cluster_in_how_it_preempts() -> None:
    assert " PreemptMode=REQUEUE " in conf()["low"]
    assert " PreemptMode=CANCEL " in conf(PreemptMode="CANCEL")["low"]
    assert " PreemptMode=SUSPEND " in conf(PreemptMode="SUSPEND,GANG")["low"]
    assert " PreemptMode=CANCEL " in conf(low__PreemptMode="CANCEL")["low"]
    assert " PreemptMode=OFF " in conf(PreemptMode="CANCEL")["high"]


def test_credentials_keep_the_sandbox_s_own_socket() -> None:
    assert conf(**{"AuthInfo.cred_expire": 10})["AuthInfo"] == f"socket={LAYOUT.munge_socket},cred_expire=10"


def test_without_accounting_nothing_points_to_a_database() -> None:
    assert "slurmdbd" not in slurm_conf(LAYOUT, Cluster(accounting=False))


@pytest.mark.parametrize("value", ["", "  ", "1\nPartitionName=x", "1\r2"])
def test_a_value_that_would_not_stay_on_its_line_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="one non-empty line"):
        settings_from({"SlurmdTimeout": value})


def test_the_password_stands_in_slurmdbd_conf_only() -> None:
    assert "StoragePass=s3cret" in slurmdbd_conf(LAYOUT, "s3cret")


def run_hook(layout: Layout, kind: str) -> int:
    script = layout.dir / kind
    script.write_text(hook_script(layout, kind))
    environment = {"PATH": os.environ["PATH"], "SLURMD_NODENAME": "n1"}
    return subprocess.run(["sh", script], env=environment, stderr=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_hook_script_fails_on_demand_and_runs_the_admin_s_hooks_in_order(tmp_path: Path, kind: str) -> None:
    layout = Layout("x", root=tmp_path)
    folder = layout.hooks / f"{kind}.d"
    folder.mkdir(parents=True)
    layout.flags.mkdir()
    assert run_hook(layout, kind) == 0, "an empty folder is fine"
    said = layout.dir / "said"
    for name, code in (("10-first", 0), ("20-second", 7), ("30-third", 0)):
        hook = folder / name
        hook.write_text(f'#!/bin/sh\necho {name} >> "$(dirname "$0")/../../said"\nexit {code}\n')
        hook.chmod(0o755)
    (folder / "README").write_text("not executable, so not run")
    assert run_hook(layout, kind) == 7
    assert said.read_text().split() == ["10-first", "20-second"]
    (layout.flags / f"fail-{kind}.n2").touch()
    assert run_hook(layout, kind) == 7, "another node's fault"
    (layout.flags / f"fail-{kind}.n1").touch()
    assert run_hook(layout, kind) == 1
    assert said.read_text().split() == ["10-first", "20-second"] * 2


def test_wrappers_break_a_command_in_three_ways(tmp_path: Path) -> None:
    def start(how: str, within_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        path = tmp_path / how
        path.write_text(wrapper_script(how))
        path.chmod(0o755)
        return subprocess.run([path], capture_output=True, text=True, timeout=within_s, check=False)

    with pytest.raises(subprocess.TimeoutExpired):
        start("hang", 0.5)
    failed = start("fail")
    assert failed.returncode == 1
    assert "Unable to contact slurm controller" in failed.stderr
    with pytest.raises(FileNotFoundError):
        start("missing")
