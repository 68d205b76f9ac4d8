"""Every way to ask for something of Slurm, and every way to ask for nonsense."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.parameters import SBATCH_OPTIONS, SlurmRequest, settle, time_limit_min

FOUR = ResilienceConfig.build({"nodes": (2, 4), "ranks_per_node": 4})
ONE = ResilienceConfig.build({"nodes": 1})


def asked(config: ResilienceConfig = ONE, **slurm: Any) -> SlurmRequest:
    return settle(slurm, config, own_names=("folder", "kwargs"))


@pytest.mark.parametrize(
    ("value", "minutes"),
    [
        (30, 30),
        (30.0, 30),
        (0.5, 1),
        ("30", 30),
        ("30:00", 30),
        ("00:30:00", 30),
        ("30:01", 31),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-0:0:1", 1441),
        (datetime.timedelta(hours=2), 120),
        ("UNLIMITED", "UNLIMITED"),
        ("infinite", "UNLIMITED"),
    ],
)
def test_time_limits_in_everybodys_words(value: Any, minutes: Any) -> None:
    """pytorchvideo#34."""
    assert time_limit_min(value) == minutes
    assert asked(time=value).options["time"] == minutes
    assert asked(timeout_min=value).options["time"] == minutes


@pytest.mark.parametrize("value", ["soon", "1:2:3:4", -5, 0, "", True, [1], datetime.timedelta(0)])
def test_what_is_no_time_limit(value: Any) -> None:
    with pytest.raises(ConfigError, match="time="):
        asked(time=value)


def test_the_same_limit_twice_is_fine_and_two_limits_are_not() -> None:
    assert asked(time="00:30:00", timeout_min=30).options["time"] == 30
    with pytest.raises(ConfigError, match="same parameter"):
        asked(time=20, timeout_min=30)


def test_nothing_said_leaves_it_to_the_partition() -> None:
    assert "time" not in asked().options
    assert "job-name" not in asked().options


@pytest.mark.parametrize(("nodes", "text"), [((2, 4), "2-4"), ((3, 3), "3"), ("1-2", "1-2"), (5, "5")])
def test_nodes(nodes: Any, text: str) -> None:
    assert asked(ResilienceConfig.build({"nodes": nodes})).options["nodes"] == text


def test_what_keeps_the_job_alive_is_always_there() -> None:
    options = asked(FOUR).options
    assert options["no-kill"] is True
    assert options["requeue"] is True
    assert options["open-mode"] == "append"
    assert options["signal"] == "USR2@90"
    assert not any(name.startswith("ntasks") for name in options)
    assert asked(ResilienceConfig.build({"requeue": False})).options["no-requeue"] is True


@pytest.mark.parametrize(
    ("lead", "limit", "signal"), [(None, 60, 90), (None, 1, 30), (30, 60, 30), (None, None, 90), (120, "UNLIMITED", 120)]
)
def test_the_warning_comes_in_time(lead: Any, limit: Any, signal: int) -> None:
    request = asked(**{"signal_delay_s": lead, "time": limit} if limit else {})
    assert request.lead_s == signal
    assert request.options["signal"] == f"USR2@{signal}"


@pytest.mark.parametrize(("lead", "limit"), [(3600, 60), (60, 1), (0, 60), (-1, 60), ("soon", 60), (True, 60), (70000, 9999)])
def test_a_warning_that_makes_no_sense_is_refused(lead: Any, limit: Any) -> None:
    """submitit#1760."""
    with pytest.raises(ConfigError, match="signal_delay_s"):
        asked(signal_delay_s=lead, time=limit)


def test_a_rank_gets_its_cpus() -> None:
    """To Slurm each node has one task, the agent, which needs the CPUs of all its ranks."""
    assert asked(FOUR, cpus_per_task=8).options["cpus-per-task"] == "32"
    assert asked(FOUR).options["cpus-per-task"] == "4"
    assert "cpus-per-task" not in asked(FOUR, exclusive=True).options
    assert "cpus-per-task" not in asked(FOUR, mincpus=16).options
    assert "cpus-per-task" not in asked(ONE).options
    with pytest.raises(ConfigError, match="cpus_per_task"):
        asked(cpus_per_task="many")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"mem_gb": 8}, "mem", "8192M"),
        ({"mem": 8}, "mem", "8G"),
        ({"mem": "500M"}, "mem", "500M"),
        ({"name": "x"}, "job-name", "x"),
        ({"job_name": "x"}, "job-name", "x"),
        ({"mail-user": "a@b"}, "mail-user", "a@b"),
        ({"slurm_qos": "low"}, "qos", "low"),
        ({"additional_parameters": {"constraint": "a100"}}, "constraint", "a100"),
        ({"exclude": ["n1", "n2"]}, "exclude", "n1,n2"),
        ({"exclusive": True}, "exclusive", True),
        ({"gpus_per_node": 4}, "gpus-per-node", "4"),
        ({"num_gpus": 2}, "gpus-per-node", "2"),
    ],
)
def test_submitits_and_sbatchs_own_names(given: dict[str, Any], name: str, value: Any) -> None:
    assert asked(**given).options[name] == value


@pytest.mark.parametrize("value", [None, False])
def test_what_is_switched_off_is_not_there(value: Any) -> None:
    assert "exclusive" not in asked(exclusive=value).options


@pytest.mark.parametrize("name", sorted(SBATCH_OPTIONS))
def test_every_option_of_sbatch_is_taken(name: str) -> None:
    value = {"time": 30}.get(name, "7")
    assert name in asked(**{name.replace("-", "_"): value}).options


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("partion", "partition"),
        ("gpus_per_nod", "gpus_per_node"),
        ("timeout", "timeout_min"),
        ("fodler", "folder"),
        ("mem_gbb", "mem_gb"),
        ("global_batch", "config="),
        ("checkpoint", "config="),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        asked(**{name: 1})


@pytest.mark.parametrize(
    "name",
    [
        "ntasks",
        "ntasks_per_node",
        "tasks_per_node",
        "array",
        "requeue",
        "no_requeue",
        "signal",
        "output",
        "error",
        "open_mode",
        "no_kill",
        "wrap",
        "srun_args",
        "use_srun",
        "gpus_per_task",
        "array_parallelism",
        "stderr_to_stdout",
    ],
)
def test_what_is_ours_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be chosen here: .{10,}"):
        asked(**{name: 1})
    with pytest.raises(ConfigError, match="cannot be chosen here"):
        asked(additional_parameters={name: 1})


def test_a_value_cannot_smuggle_a_line_into_the_script() -> None:
    with pytest.raises(ConfigError, match="line break"):
        asked(comment="x\n#SBATCH --uid=0")


def test_setup_lines() -> None:
    assert asked(setup=["module load cuda"]).setup == ("module load cuda",)
    with pytest.raises(ConfigError, match="list of shell lines"):
        asked(setup="module load cuda")


def test_a_minimum_on_which_the_mesh_never_fits_is_refused_before_it_is_queued() -> None:
    wide = ResilienceConfig.build({"nodes": (2, 4), "ranks_per_node": 4, "mesh": {"tp": 4, "pp": 3}})
    with pytest.raises(ConfigError, match="does not fit on fewer than 3 nodes"):
        settle({}, wide)
