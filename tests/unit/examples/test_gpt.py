"""The GPT example: its data are the same everywhere, its script runs as a user would run it, its curve has no seams."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slurm_resilience.observe.events import read_events
from slurm_resilience.training.metrics import history
from tests.unit.training import programs
from tests.unit.training.worlds import run_world

GPT = Path(__file__).resolve().parents[3] / "examples" / "gpt"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpt_{name}", GPT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


data, model = load("data"), load("model")


def test_the_text_is_real_whole_and_the_same_each_time() -> None:
    text, again = data.standard_library(32, 50_000), data.standard_library(32, 50_000)
    assert torch.equal(text.tokens, again.tokens)
    assert text.fingerprint == again.fingerprint != data.standard_library(32, 50_001).fingerprint
    assert b"import" in bytes(text.tokens.numpy())


def test_training_and_validation_samples_share_nothing_and_leave_nothing_out() -> None:
    text = data.standard_library(16, 20_000)
    assert text.num_train + text.num_validation == (20_000 - 1) // 16

    def starts(rows: torch.Tensor) -> set[tuple[int, ...]]:
        return {tuple(row.tolist()) for row in rows}

    text.tokens[:] = 0
    text.tokens[::16] = 0
    for sample in range(text.num_train + text.num_validation):
        text.tokens[sample * 16 : sample * 16 + 2] = torch.tensor([sample // 250, sample % 250], dtype=torch.uint8)
    train, _ = text.train(list(range(text.num_train)))
    validation, _ = text.validation(range(text.num_validation))
    assert len(starts(train[:, :2])) == text.num_train
    assert len(starts(train[:, :2]) | starts(validation[:, :2])) == text.num_train + text.num_validation


def test_targets_are_the_next_bytes() -> None:
    text = data.standard_library(16, 20_000)
    tokens, targets = text.train([0, 7])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(model.GPTConfig(layers=2, width=16, heads=2, context=12)).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 1
    assert torch.equal(gpt(tokens)[0, :8], gpt(changed)[0, :8])
    assert not torch.equal(gpt(tokens)[0, 8:], gpt(changed)[0, 8:])


def script(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(GPT / "train.py"), "--folder", str(folder), *options]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, cwd="/")


def test_the_script_runs_alone_and_goes_on_where_it_was(tmp_path: Path) -> None:
    first = script(tmp_path / "run", "--steps", "4", "--checkpoint-every", "2", "--global-batch", "8")
    assert first.returncode == 0, first.stderr
    assert "completed at step 4" in first.stdout
    second = script(tmp_path / "run", "--steps", "6", "--global-batch", "8", "--validate-every", "6")
    assert second.returncode == 0, second.stderr
    assert "resumed at step 4 with 1 ranks, attempt 2" in second.stdout
    assert "validation loss" in second.stdout
    other = script(tmp_path / "run", "--steps", "8", "--global-batch", "9")
    assert other.returncode != 0
    assert "a global batch of 8, not 9" in other.stderr


def test_options_that_are_not_known_are_refused(tmp_path: Path) -> None:
    result = script(tmp_path / "run", "--step", "4")
    assert result.returncode == 2
    assert "--step" in result.stderr


def furthest(mine: dict[int, Any], theirs: dict[int, Any], name: str) -> float:
    assert mine.keys() == theirs.keys()
    return max(abs(mine[step][name] - theirs[step][name]) / abs(theirs[step][name]) for step in theirs)


@pytest.mark.parametrize(("global_batch", "micro_batch"), [(24, 2), (22, 3)])
def test_four_three_two_and_four_ranks_draw_the_curve_of_one(tmp_path: Path, global_batch: int, micro_batch: int) -> None:
    options = {"global_batch": global_batch, "micro_batch": micro_batch, "total": 40, "validate_every": 10}
    run_world(1, programs.example, str(tmp_path / "one"), 40, options)
    for world, until in ((4, 12), (3, 20), (2, 31), (4, 40)):
        results = run_world(world, programs.example, str(tmp_path / "many"), until, options)
        assert len({one["outcome"] for one in results}) == 1
    one, many = history(tmp_path / "one"), history(tmp_path / "many")
    assert [line["world"] for line in many.values()] == [4] * 12 + [3] * 8 + [2] * 11 + [4] * 9
    for name in ("loss", "grad_norm", "lr", "samples"):
        assert furthest(many, one, name) <= 1e-5, name
    validated = {step: line for step, line in one.items() if "validation_loss" in line}
    assert list(validated) == [10, 20, 30, 40]
    assert furthest({step: many[step] for step in validated}, validated, "validation_loss") <= 1e-5
    assert [event["step"] for event in read_events(tmp_path / "many") if event["event"] == "resumed"] == [12, 20, 31]
