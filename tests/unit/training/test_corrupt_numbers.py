"""Corruption, second class: file digests and state digest fit, and a number, a generator or an owner is wrong.

Each is found by the check that is there for it, and the run goes on from the newest good checkpoint, in one go, as if the bad
one had never been.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.observe.events import read_events
from slurm_resilience.training import witness
from slurm_resilience.training.verify import OwnRun, Restored, Verdict, _second_account, _whose

from . import programs
from .forge import Forgery, forged
from .worlds import run_world

EVERY_3: dict[str, Any] = {"checkpoint": {"every_steps": 3, "every_min": None, "keep_last": 9}}
RNG = "per_rank.rank{:05d}.t:rng"


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    close()


def close() -> None:
    if Run._current is not None:
        Run._current.close()


def attempt(folder: Path, total: int) -> dict[str, Any]:
    close()
    torch.manual_seed(0)
    return programs.train(total, folder=str(folder), settings=EVERY_3, dropout=0.2, probe=True)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run of six steps with checkpoints at three and six, and the losses of one that went on to eight."""
    whole = attempt(tmp_path_factory.mktemp("whole"), 8)["loss"]
    folder = tmp_path_factory.mktemp("honest")
    attempt(folder, 6)
    close()
    return folder, whole


def _rate(it: Forgery) -> None:
    it.plain["lr"]["optimizer"][0] *= 1.5
    it.plain["last_lr"]["scheduler"][0] *= 1.5
    it.plain["optimizers"]["optimizer"]["groups"][0]["numbers"]["lr"] *= 1.5
    it.plain["schedulers"]["scheduler"]["_last_lr"][0] *= 1.5


def _case_6_decay(it: Forgery) -> None:
    """Case 6: weight decay that somebody wrote over."""
    it.plain["optimizers"]["optimizer"]["groups"][0]["numbers"]["weight_decay"] = 0.1


def _betas(it: Forgery) -> None:
    numbers = it.plain["optimizers"]["optimizer"]["groups"][0]["numbers"]
    numbers["eps"] = numbers["eps"] * 10


def _schedule(it: Forgery) -> None:
    it.plain["schedulers"]["scheduler"]["last_epoch"] -= 1
    it.plain["schedulers"]["scheduler"]["_step_count"] -= 1


def _sampler(it: Forgery) -> None:
    it.plain["data"]["train"]["consumed"] -= 22


def _sampler_twice(it: Forgery) -> None:
    _sampler(it)
    it.plain["witness"]["places"]["train"][0][1] -= 22


def _generators(it: Forgery) -> None:
    key = RNG.format(0)
    state = it.tensors[key].clone()
    here = bytes(state.tolist()).index(b'"torch"') + 4000  # one word of the Mersenne twister, drawn from much later
    state[here] = ord("A") if state[here] != ord("A") else ord("B")
    it.tensors[key] = state


def _generators_of_step_three(it: Forgery) -> None:
    older = Forgery(next(it.directory.parent.glob("step-00000003-*")))
    it.tensors[RNG.format(0)] = older.tensors[RNG.format(0)]
    it.set_own(0, older.own(0))


def _step(it: Forgery) -> None:
    it.plain["counters"]["step"] = it.plain["data"]["train"]["step"] = it.plain["witness"]["step"] = 7
    it.plain["history"][-1][0] = 7


def _case_5_step_before_the_update(it: Forgery) -> None:
    """Case 5: all state is that of before the update, and the counters are those of after it."""
    older = Forgery(next(it.directory.parent.glob("step-00000003-*")))
    for key in it.tensors:
        if key.startswith(("model", "optimizer")):
            it.tensors[key] = older.tensors[key]


def _case_5_weights_before_the_update(it: Forgery) -> None:
    """Case 5, where only the weights are too old."""
    older = Forgery(next(it.directory.parent.glob("step-00000003-*")))
    for key in it.tensors:
        if key.startswith("model"):
            it.tensors[key] = older.tensors[key]


def _nan(it: Forgery) -> None:
    it.tensors["optimizer.state.model.3.weight.exp_avg_sq"][0, 0] = math.nan


def _other_run(it: Forgery) -> None:
    it.plain["witness"]["run"] = "somebody-elses"


def _one_parameter_missed_an_update(it: Forgery) -> None:
    it.tensors["optimizer.state.model.3.bias.step"] -= 1


CORRUPTIONS: list[tuple[Callable[[Forgery], None], str]] = [
    (_rate, "learning rate of optimizer"),
    (_case_6_decay, "weight_decay of optimizer"),
    (_betas, "eps of optimizer"),
    (_schedule, "steps counted by scheduler"),
    (_sampler, "samples consumed of train: expected [1, 22], measured [1, 0]"),
    (_sampler_twice, "samples consumed of train by arithmetic"),
    (_generators, "rng: state of torch"),
    (_generators_of_step_three, "rng: whose state"),
    (_step, "step: expected 6, measured 7"),
    (_case_5_step_before_the_update, "updates counted by optimizer"),
    (_case_5_weights_before_the_update, "probe loss"),
    (_nan, "tensors that are not finite"),
    (_other_run, "run: expected"),
    (_one_parameter_missed_an_update, "updates counted by optimizer: expected [6.0, 6.0], measured [5.0, 6.0]"),
]


@pytest.mark.parametrize(("change", "named"), CORRUPTIONS, ids=[change.__name__[1:] for change, _ in CORRUPTIONS])
def test_it_is_named_and_rolled_back_in_one_go(
    tmp_path: Path, honest: tuple[Path, dict[int, float]], change: Callable[[Forgery], None], named: str
) -> None:
    folder, whole = tmp_path / "run", honest[1]
    shutil.copytree(honest[0], folder)
    with forged(folder / "checkpoints", digest=True) as it:
        change(it)
    again = attempt(folder, 8)
    ((_, reason),) = again["rejected"]
    assert named in reason
    assert again["start"] == 3
    assert again["loss"] == {step: whole[step] for step in range(4, 9)}
    states = {entry.step: str(entry.state) for entry in CheckpointStore.open(folder / "checkpoints").entries()}
    assert states[3] == "verified"
    assert [event["event"] for event in read_events(folder)].count("resumed") == 1


def test_one_of_an_attempt_that_never_was_is_refused(tmp_path: Path, honest: tuple[Path, dict[int, float]]) -> None:
    """A node that was fenced off comes back and has left a checkpoint under a number that no attempt of this run has had."""
    folder = tmp_path / "run"
    shutil.copytree(honest[0], folder)
    root = folder / "checkpoints"
    (newest,) = root.glob("step-00000006-*")
    it = Forgery(newest)
    it.directory = newest.rename(root / newest.name.replace("-a00001-", "-a00009-"))
    it.entry.update(name=it.directory.name, attempt=9)
    it.plain["witness"]["attempt"] = 9
    it.remake_digest()
    it.write()
    again = attempt(folder, 8)
    assert again["start"] == 3
    ((_, reason),) = again["rejected"]
    assert "attempt: expected at most 2, which is this one, measured 9" in reason


def test_the_wrong_generators_of_one_rank_condemn_the_entry_on_all(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "settings": EVERY_3}
    run_world(2, programs.train_dropout, 6, **options)
    with forged(tmp_path / "checkpoints", digest=True) as it:
        it.tensors[RNG.format(1)] = it.tensors[RNG.format(0)]
    results = run_world(2, programs.train_dropout, 7, attempt=2, **options)
    assert [one["start"] for one in results] == [3, 3]
    assert "on rank 1" in results[0]["rejected"][0][1]
    assert "rng: state of " in results[0]["rejected"][0][1]


def test_a_run_that_has_not_trained_may_begin_from_anothers_checkpoint_and_go_back_to_it(
    tmp_path: Path, honest: tuple[Path, dict[int, float]]
) -> None:
    shutil.copytree(honest[0] / "checkpoints", tmp_path / "checkpoints")
    first = attempt(tmp_path, 9)
    assert first["start"] == 6
    assert first["rejected"] == []
    assert first["checks"]["run"].verdict == Verdict.INCONCLUSIVE
    with forged(tmp_path / "checkpoints", digest=True) as it:
        _nan(it)
    assert attempt(tmp_path, 9)["start"] == 6


# -- the second account by itself ---------------------------------------------------------------------------------


def scheduled(kind: Callable[[Any], Any]) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = kind(optimizer)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def account(optimizer: torch.optim.Optimizer, scheduler: Any, noted: dict[str, Any]) -> dict[str, Any]:
    from slurm_resilience.training.state import Registry

    registry = Registry()
    registry.add({"optimizer": optimizer, "scheduler": scheduler})
    noted = {"step": 4, "groups": {}, "updates": {}, "places": {}, "schedules": {"scheduler": noted}}
    checks = _second_account(Restored(registry, {"witness": noted}, 4, 1, 1, None, ()))
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    "kind",
    [
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 10),
        lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
        lambda one: torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=9),
    ],
)
def test_a_closed_form_finds_what_was_changed_everywhere_alike(kind: Callable[[Any], Any]) -> None:
    optimizer, scheduler = scheduled(kind)
    noted = witness._schedule(scheduler)
    assert noted["is_formula"]
    name = "learning rate by the formula of scheduler"
    assert account(optimizer, scheduler, noted)[name].verdict is Verdict.PASSED
    scheduler.last_epoch -= 1
    assert account(optimizer, scheduler, {**noted, "counts": witness.counts(scheduler)})[name].verdict is Verdict.FAILED


def test_a_schedule_of_ones_own_may_be_changed(tmp_path: Path) -> None:
    optimizer, scheduler = scheduled(lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)))
    noted = witness._schedule(scheduler)
    scheduler.lr_lambdas = [lambda step: 1 / (2 + step)]
    check = account(optimizer, scheduler, noted)["learning rate by the formula of scheduler"]
    assert check.verdict is Verdict.INCONCLUSIVE


def test_counts_of_schedulers_inside_others_are_noted_too() -> None:
    parts = torch.optim.lr_scheduler
    _, scheduler = scheduled(
        lambda one: parts.SequentialLR(one, [parts.LinearLR(one), parts.CosineAnnealingLR(one, 9)], milestones=[2])
    )
    before = witness.counts(scheduler)
    scheduler._schedulers[1].last_epoch += 1
    assert witness.counts(scheduler) != before


def test_groups_in_another_order_are_the_same_groups() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    names = {id(a): "a", id(b): "b"}
    one = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}])
    other = torch.optim.SGD([{"params": [b], "lr": 0.2}, {"params": [a], "lr": 0.1}])
    assert witness.groups(one, names) == witness.groups(other, names)


def test_an_older_attempt_of_this_run_is_its_own(tmp_path: Path) -> None:
    restored = Restored(
        None, {"witness": {"run": "me", "attempt": 3}}, 6, 1, 1, None, (), "step-00000006-a00003-0badcafe", 3, OwnRun("me", 5)  # type: ignore[arg-type]
    )  # fmt: skip
    assert {check.verdict for check in _whose(restored)} == {Verdict.PASSED}
