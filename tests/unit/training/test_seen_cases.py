"""Failures that other systems have had, each as a test that is named after it.  A case is quoted, then tried.

=====  ===========================================================================================================
case   where
=====  ===========================================================================================================
1      here
2, 3   test_fallback.py, test_case_2_and_3_…: what any generator refuses, NumPy's among them; and here for NumPy's alone
4      test_fallback.py, test_case_4_…
5, 6   test_corrupt_numbers.py, the corruptions case_5_…, case_6_…
7-10   here; 10 in test_guard.py, too
11     test_fallback.py, test_case_11_…
12     test_fallback.py, test_case_12_…
=====  ===========================================================================================================
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.observe.events import read_events

from . import programs
from .forge import Forgery, forged

EVERY_3: dict[str, Any] = {"every_steps": 3, "every_min": None, "keep_last": 9}
RNG = "per_rank.rank00000.t:rng"


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    close()


def close() -> None:
    if Run._current is not None:
        Run._current.close()


def attempt(folder: Path, total: int, **checkpoint: Any) -> dict[str, Any]:
    close()
    torch.manual_seed(0)
    settings = {"checkpoint": {**EVERY_3, **checkpoint}}
    return programs.train(total, folder=str(folder), settings=settings, dropout=0.2, probe=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run of eight steps that nothing happens to."""
    return dict(attempt(tmp_path_factory.mktemp("whole"), 8)["loss"])


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints at three and six."""
    folder = tmp_path_factory.mktemp("honest")
    attempt(folder, 6)
    close()
    return folder


@pytest.fixture
def run_folder(tmp_path: Path, honest: Path) -> Path:
    shutil.copytree(honest, tmp_path / "run")
    return tmp_path / "run"


def checks() -> dict[str, Any]:
    assert Run._current is not None
    assert Run._current.resumed is not None
    return {check.name: check for check in Run._current.resumed.checks}


def test_case_1_a_local_replica_with_wrong_tensors_is_caught_before_the_first_step(
    tmp_path: Path, whole: dict[int, float]
) -> None:
    """A local replica of a shard comes back with thousands of tensors wrong; the loss turns NaN three steps later; 44 identical
    restart loops.  Right: caught before the first step, next older entry, one loop."""
    mem: dict[str, Any] = {"local_every_steps": 1, "local_dir": str(tmp_path / "mem")}

    class Dies(Exception):
        pass

    folder, settings = tmp_path / "run", {"checkpoint": {**EVERY_3, **mem}}

    def dies(run: Run, total: int) -> None:
        model = programs.make_model(0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.register(model=model, optimizer=optimizer)
        batches = run.batches(101, 22, 3)
        run.resume()
        for step in run.steps(total):
            for micro in batches(step):
                x, y = programs.sample(micro.indices)
                run.scale_loss(torch.nn.functional.cross_entropy(model(x), y), micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                raise Dies

    with pytest.raises(Dies), Run(folder=folder, **settings) as run:
        dies(run, 9)
    (copies,) = (tmp_path / "mem").glob("*/rank00000-of-00001")
    newest = max(CheckpointStore.open(copies).entries(), key=lambda entry: entry.order)
    assert newest.step == 4, "the copy is newer than the checkpoint of step 3"
    for entry in CheckpointStore.open(copies).entries():
        with forged(copies, step=entry.step) as it:
            for key, value in it.tensors.items():
                if key.startswith("model"):
                    value.mul_(1.5)
    with Run(folder=folder, **settings) as again:
        model = programs.make_model(0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        again.register(model=model, optimizer=optimizer)
        again.batches(101, 22, 3)
        assert again.resume() == 3
        assert again.resumed is not None
        assert again.resumed.tier == "shared"
    told = [event for event in read_events(folder) if event["event"] == "local_copy_failed"]
    assert "own copy" in told[0]["error"]
    assert "model.0.weight holds other bits" in told[0]["error"]


def spoil_numpy(it: Forgery) -> None:
    state = json.loads(bytes(it.tensors[RNG].tolist()))
    state["numpy"]["bit_generator"] = "PCG64"
    it.tensors[RNG] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def test_case_3_a_numpy_state_that_is_refused_is_fatal_for_the_entry(run_folder: Path, whole: dict[int, float]) -> None:
    """NumPy RNG state refused by the weights-only loader and silently skipped.  Right: restored or fatal."""
    with forged(run_folder / "checkpoints", digest=True) as it:
        spoil_numpy(it)
    out = attempt(run_folder, 8)
    ((step, reason),) = out["rejected"]
    assert (step, out["start"]) == (6, 3)
    assert "rng: the generators refused their state" in reason
    assert out["loss"] == {step: whole[step] for step in range(4, 9)}


def test_case_3_a_numpy_state_comes_back(tmp_path: Path) -> None:
    def drawn(run: Run) -> list[int]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.register(model=model, optimizer=optimizer)
        run.resume()
        for _ in run.steps(2):
            np.random.rand(3)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return [int(n) for n in np.random.randint(0, 1 << 30, 4)]

    np.random.seed(5)
    with Run(folder=tmp_path) as run:
        first = drawn(run)
    np.random.seed(99)
    with Run(folder=tmp_path) as run:
        assert drawn(run) == first


class Feed(torch.utils.data.Dataset[Any]):
    """Counts what is read from it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.full((2,), float(index))


@pytest.mark.parametrize("probed", [False, True])
def test_case_7_the_probe_draws_nothing_from_the_loader(tmp_path: Path, probed: bool) -> None:
    """The probe's forward pass draws from the loader and shifts the data by one batch.  Right: it does not."""
    seen: list[list[float]] = []
    for total in (3, 6):
        with Run(folder=tmp_path, checkpoint=EVERY_3) as run:
            model, feed = torch.nn.Linear(2, 1), Feed()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            run.register(model=model, optimizer=optimizer)
            batches = run.loader(feed, global_batch=4, micro_batch=4, shuffle=False)
            if probed:
                run.probe(lambda x, model=model: model(x).sum(), torch.ones(3, 2))
            run.resume()
            assert feed.read == [], "something was read before the first step"
            for step in run.steps(total):
                for micro, batch in batches(step):
                    seen.append(batch[:, 0].tolist())
                    run.scale_loss(model(batch).sum(), micro).backward()
                optimizer.step()
    assert seen == [[float(4 * step + place) for place in range(4)] for step in range(6)]


def test_case_8_batch_norm_is_put_back_bit_by_bit_after_the_probe(tmp_path: Path) -> None:
    """BatchNorm buffers change through the probe.  Right: put back bitwise."""
    buffers: dict[str, Any] = {}
    for total in (3, 4):
        with Run(folder=tmp_path, checkpoint=EVERY_3) as run:
            model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            run.register(model=model, optimizer=optimizer)

            def loss_in_training_mode(x: torch.Tensor, model: Any = model) -> torch.Tensor:
                model.train()
                return model(x).pow(2).mean()  # type: ignore[no-any-return]

            run.probe(loss_in_training_mode, torch.randn(8, 2))
            run.resume()
            if run.resumed is not None:
                assert checks()["probe loss"].verdict == "passed"
                assert {name: value.tolist() for name, value in model.named_buffers()} == buffers
            for _ in run.steps(total):
                model(torch.randn(8, 2)).pow(2).mean().backward()
                optimizer.step()
            buffers = {name: value.tolist() for name, value in model.named_buffers()}


def test_case_9_the_probe_is_compared_with_its_own_loss_and_not_with_the_logged_one(run_folder: Path) -> None:
    """The loss logged at step N belongs to weights before update N; comparing the probe with it fails always.  Right: the
    probe's own recorded loss is compared."""
    out = attempt(run_folder, 7)
    assert out["rejected"] == []
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [line["loss"] for line in lines if line.get("step") == 6]
    check = out["checks"]["probe loss"]
    assert check.verdict == "passed"
    assert check.expected != pytest.approx(logged, rel=1e-3)


@pytest.mark.parametrize("spoilt", [False, True])
def test_case_10_without_a_history_exact_checks_still_decide(run_folder: Path, spoilt: bool) -> None:
    """First checkpoint ever: no history.  Right: inconclusive for the statistical checks, exact ones still decide."""
    (run_folder / "metrics.jsonl").unlink()
    with forged(run_folder / "checkpoints", digest=True) as it:
        it.plain["history"] = []
        if spoilt:
            it.plain["counters"]["step"] = 5
    out = attempt(run_folder, 17)
    assert out["start"] == (3 if spoilt else 6)
    (told,) = [event for event in read_events(run_folder) if event["event"] == "first_steps_checked"]
    assert told["verdict"] == "inconclusive"
    assert "loss has no history of 16 steps" in told["reasons"]
