"""Nonsense is refused with a sentence that helps, before anything is started or queued."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.config import LimitsConfig, ResilienceConfig
from slurm_resilience.errors import ConfigError, ExitCode


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        ResilienceConfig.build(values)
    assert caught.value.exit_code == ExitCode.CONFIG_ERROR
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": (4, 2)}, ["minimum is above the maximum", "(2, 4)"]),
        ({"nodes": "4-2"}, ["(2, 4)"]),
        ({"nodes": (0, 2)}, ["at least one node"]),
        ({"nodes": "two"}, ["nodes"]),
        ({"nodes": (1, 4), "ranks_per_node": 2, "global_batch": 7}, ["global_batch=7", "8 ranks", "no sample"]),
        ({"global_batch": 4, "micro_batch": 8}, ["micro_batch=8", "global_batch=4"]),
        ({"ranks_per_node": 0}, ["ranks_per_node", "greater than or equal to 1"]),
        ({"glob_batch": 8}, ["unknown key 'glob_batch'", "did you mean 'global_batch'"]),
        ({"checkpoint": {"every_step": 5}}, ["'checkpoint.every_step'", "did you mean 'every_steps'"]),
        ({"limits": {"agent_silence_s": 4.0}}, ["agent_silence_s (4.0)", "node_silence_s (4.0)"]),
        ({"limits": {"step_s": float("inf")}}, ["limits.step_s", "finite"]),
        ({"limits": {"step_s": float("nan")}}, ["limits.step_s"]),
        ({"checkpoint": 5}, ["checkpoint"]),
        ({"seed": "many", "spares": -1}, ["seed", "spares"]),
    ],
)
def test_nonsense_is_refused_by_name(values: dict[str, Any], words: list[str]) -> None:
    text = refusal(values)
    for word in words:
        assert word in text
    assert "How we know" in text
    assert "\n" not in text


@pytest.mark.parametrize("given", [3, "3", "3-3", (3, 3), [3, 3]])
def test_one_number_of_nodes_is_a_fixed_size(given: Any) -> None:
    assert ResilienceConfig.build({"nodes": given}).nodes == (3, 3)


def test_preload_may_be_written_as_on_a_command_line() -> None:
    assert ResilienceConfig.build({"preload": "torch, numpy"}).preload == ("torch", "numpy")
    assert ResilienceConfig.build({"preload": ""}).preload == ()


def test_defaults_hold_their_own_rules_and_the_lease() -> None:
    ResilienceConfig.build({})
    limits = LimitsConfig()
    assert limits.agent_silence_s + 1.0 <= limits.node_silence_s


def test_a_dump_is_json_and_comes_back_equal() -> None:
    config = ResilienceConfig.build({"nodes": "2-4", "checkpoint": {"every_steps": 7}, "preload": "torch numpy"})
    dumped = json.loads(json.dumps(config.model_dump(mode="json"), allow_nan=False))
    assert ResilienceConfig.build(dumped) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_later_sources_win_and_leave_the_rest_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("nodes: 2-4\ncheckpoint: {every_steps: 5, keep_last: 2}\n")
    config = ResilienceConfig.load(file, {"checkpoint.every_steps": 9, "limits": {"step_s": 30}})
    assert (config.nodes, config.checkpoint.every_steps, config.checkpoint.keep_last) == ((2, 4), 9, 2)
    assert config.limits.step_s == 30
    assert config.limits.node_silence_s == LimitsConfig().node_silence_s


def test_the_environment_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODES", "RESILIENCE_NODES", "SLURM_RESILIENCE_NODES"):
        monkeypatch.setenv(name, "9-9")
    assert ResilienceConfig.load(None, {"nodes": "2-4"}).nodes == (2, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: 2\nnodes: 3\n", "'nodes' stands twice"),
        ("limits: {step_s: 3, step_s: 4}\n", "'step_s' stands twice"),
        ("nodes: [2, 4\n", "not YAML"),
        ("? [a]\n: 1\n", "not YAML"),
        ("- nodes\n", "holds a list"),
        ("!!python/object/apply:os.system ['true']\n", "not YAML"),
        ("nodez: 2\n", "did you mean 'nodes'"),
        ("3: 4\n", "3"),
        (b"nodes: \xff\n", "Cannot read"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, text: str | bytes, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        ResilienceConfig.load(file)
    assert "Traceback" not in str(caught.value)


def test_an_empty_or_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match="Cannot read"):
        ResilienceConfig.load(file)
    file.write_text("# nothing yet\n")
    assert ResilienceConfig.load(file) == ResilienceConfig()


def test_yaml_anchors_and_merges_still_work(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint: &c {every_steps: 5}\nlimits: {<<: {step_s: 7}, init_s: 9}\n")
    config = ResilienceConfig.load(file)
    assert (config.checkpoint.every_steps, config.limits.step_s, config.limits.init_s) == (5, 7, 9)


def test_a_value_cannot_be_used_as_a_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint: 5\n")
    with pytest.raises(ConfigError, match="'checkpoint' is not a section"):
        ResilienceConfig.load(file, {"checkpoint.every_steps": 3})


def test_who_raises_the_silence_of_a_node_need_not_raise_that_of_the_supervisor_too() -> None:
    config = ResilienceConfig.build({"limits": {"node_silence_s": 600.0}})
    assert config.limits.takeover_s == 600.5
    assert ResilienceConfig.build({}).limits.takeover_s == 4.5
    assert ResilienceConfig.build({"limits": {"takeover_s": 0}}).limits.takeover_s == 0
    with pytest.raises(ConfigError, match="takeover_s"):
        ResilienceConfig.build({"limits": {"node_silence_s": 600.0, "takeover_s": 4.5}})
