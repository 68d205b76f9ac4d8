"""A run of one rank without an agent, from its start to its ends."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.errors import MismatchedCheckpoint
from slurm_resilience.checkpoint.manifest import read_manifest
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, ConfigError, Fenced, NoValidCheckpoint
from slurm_resilience.observe.events import read_events
from slurm_resilience.training import verify
from slurm_resilience.training.metrics import history

from . import programs

EVERY_2 = {"checkpoint": {"every_steps": 2, "keep_last": 5}}


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if Run._current is not None:
        Run._current.close()


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    """A new process's Run on the same folder, as far as one process can be another."""

    def make(**settings: Any) -> Run:
        if Run._current is not None:
            Run._current.close()
        return Run(folder=tmp_path / "run", **settings)

    return make


def small(run: Run, scheduler: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = programs.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50) if scheduler else None
    run.register(model=model, optimizer=optimizer, scheduler=one)
    return model, optimizer, one


def one_step(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    optimizer.zero_grad()
    x, y = programs.sample(range(4 * step, 4 * step + 4))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.item()


def go(run: Run, total: int) -> dict[int, float]:
    parts = small(run)
    run.resume()
    losses = {}
    for step in run.steps(total):
        losses[step] = one_step(step, *parts)
        run.report(loss=losses[step])
    return losses


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [fact for fact in read_events(run.folder) if fact["event"] == kind]


def steps_of(run: Run) -> list[int]:
    store = CheckpointStore.open(run.folder / "checkpoints")
    return sorted(entry.step for entry in store.entries() if entry.usable)


def test_a_run_goes_on_exactly_where_it_was(begin: Callable[..., Run], tmp_path: Path) -> None:
    whole = go(Run(folder=tmp_path / "other"), 8)
    first = go(begin(), 5)
    run = begin()
    second = go(run, 8)
    assert list(second) == [5, 6, 7]
    assert {**first, **second} == whole
    assert run.outcome == "completed"
    assert run.attempt == 2
    assert [(one["attempt"], one["step"]) for one in events(run, "resumed")] == [(2, 5)]
    assert [one["step"] for one in events(run, "finished")] == [5, 8]
    assert {step: line["loss"] for step, line in history(run.folder).items()} == {
        step + 1: loss for step, loss in whole.items()
    }
    assert json.loads((run.folder / "run.json").read_text())["run_id"] == run.run_id


def test_a_run_that_is_complete_trains_nothing_and_says_so(begin: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    go(begin(), 3)
    run = begin()
    with caplog.at_level(logging.WARNING):
        assert go(run, 3) == {}
    assert run.outcome == "already_complete"
    assert "already complete" in caplog.text
    assert steps_of(run) == [3]
    assert events(run, "finished")[-1]["outcome"] == "already_complete"


def test_a_second_and_longer_loop_is_an_error_and_not_skipped(begin: Callable[..., Run]) -> None:
    run = begin()
    go(run, 2)
    with pytest.raises(ConfigError, match=r"run.steps\(5\) came after the run was complete at step 2"):
        next(run.steps(5))
    assert list(run.steps(2)) == []


def test_a_full_disk_costs_lines_of_the_curve_and_not_the_run(begin: Callable[..., Run]) -> None:
    run = begin()
    parts = small(run)
    run.resume()
    assert run._stepper is not None
    assert run._stepper._metrics is not None
    file = run._stepper._metrics
    whole = file._fd
    for step in run.steps(4):
        file._fd = os.open("/dev/full", os.O_WRONLY) if step == 1 else whole
        one_step(step, *parts)
    assert list(history(run.folder)) == [1, 3, 4]


def test_a_checkpoint_knows_its_configuration_and_another_one_is_warned_of(
    begin: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(seed=3)
    go(run, 2)
    store = CheckpointStore.open(run.folder / "checkpoints")
    latest = store.latest()
    assert latest is not None
    config = store.manifest(latest).extra["training"]["config"]
    assert (config["seed"], len(config["sha256"])) == (3, 64)
    for seed, said in ((3, False), (4, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run = begin(seed=seed)
            small(run)
            run.resume()
        assert ("taken with another configuration: seed 3 is now 4" in caplog.text) is said


def test_checkpoints_are_taken_when_due_and_old_ones_go(begin: Callable[..., Run]) -> None:
    run = begin(checkpoint={"every_steps": 2, "keep_last": 2})
    go(run, 7)
    assert steps_of(run) == [6, 7]
    assert [one["step"] for one in events(run, "checkpoint_committed")] == [2, 4, 6, 7]


def test_minutes_since_the_last_save_make_one_due(begin: Callable[..., Run]) -> None:
    run = begin(checkpoint={"every_min": 1e-9})
    go(run, 3)
    assert steps_of(run) == [1, 2, 3]


def test_a_checkpoint_asked_for_inside_a_step_holds_the_state_after_it(begin: Callable[..., Run]) -> None:
    run = begin()
    parts = small(run)
    run.resume()
    for step in run.steps(4):
        if step == 1:
            run.checkpoint()  # the optimizer has not stepped yet
        one_step(step, *parts)
        if step == 2:
            break
    run.checkpoint()  # outside of the loop: at once, of what is complete
    assert steps_of(run) == [2, 3]


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR2, "SIGUSR2")])
def test_a_signal_stops_the_loop_after_a_save_whatever_the_user_catches(
    begin: Callable[..., Run], number: int, cause: str
) -> None:
    """``except Exception: pass`` around a loop: the stop is no exception that it could swallow."""
    run = begin()
    parts = small(run)
    run.resume()
    done = []
    for step in run.steps(100):
        try:
            one_step(step, *parts)
            done.append(step)
            if step == 2:
                os.kill(os.getpid(), number)
            raise RuntimeError("an error of the user's own")
        except Exception:
            pass
    assert done == [0, 1, 2]
    assert run.stopping
    assert run.outcome == "stopped"
    assert steps_of(run) == [3]
    assert [(one["step"], one["why"], one["saved"]) for one in events(run, "stopped")] == [(3, cause, True)]
    assert list(run.steps(100)) == []


def test_usr1_saves_and_goes_on(begin: Callable[..., Run]) -> None:
    run = begin()
    parts = small(run)
    run.resume()
    for step in run.steps(4):
        one_step(step, *parts)
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
    assert steps_of(run) == [2, 4]
    assert run.outcome == "completed"


def test_should_stop_ends_the_step_that_asked(begin: Callable[..., Run]) -> None:
    """spd#740: a long evaluation."""
    run = begin()
    parts = small(run)
    run.resume()
    looked = 0
    for step in run.steps(10):
        one_step(step, *parts)
        os.kill(os.getpid(), signal.SIGTERM)
        with run.section("eval"):
            while not run.should_stop():
                looked += 1
    assert (run.step, looked) == (1, 0)


@pytest.mark.parametrize("update_first", [True, False])
def test_leaving_early_is_complete_with_finish_and_counts_the_updates_made(
    begin: Callable[..., Run], update_first: bool
) -> None:
    run = begin()
    parts = small(run)
    run.resume()
    for step in run.steps(100):
        if step == 3 and update_first:
            one_step(step, *parts)
        if step == 3:
            break
        one_step(step, *parts)
    assert run.outcome == ""
    run.finish()
    assert run.outcome == "completed"
    assert steps_of(run) == [4 if update_first else 3]


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_a_scheduler_built_after_loading_is_an_error_that_explains(begin: Callable[..., Run]) -> None:
    run = begin()
    _, optimizer, _ = small(run, scheduler=False)
    run.resume()
    late = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match="overwrites the learning rate that was restored"):
        run.steps(3)
    with pytest.raises(ConfigError, match=r"scheduler=….*came after run\.resume"):
        run.register(scheduler=late)


def test_a_scheduler_that_nobody_registered_is_found_before_loading(begin: Callable[..., Run]) -> None:
    run = begin()
    _, optimizer, _ = small(run, scheduler=False)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match="not registered"):
        run.resume()


def test_a_scheduler_of_a_kind_of_its_own_counts(begin: Callable[..., Run]) -> None:
    class Own:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    run = begin()
    _, optimizer, _ = small(run, scheduler=False)
    run.register(warmup=Own(optimizer))
    assert run.resume() == 0


def test_calls_in_the_wrong_order_are_errors(begin: Callable[..., Run]) -> None:
    run = begin()
    with pytest.raises(ConfigError, match=r"run.steps\(\) came before run.resume\(\)"):
        run.steps(3)
    with pytest.raises(ConfigError, match="Nothing is registered"):
        run.resume()
    small(run)
    run.resume()
    with pytest.raises(ConfigError, match="called twice"):
        run.resume()
    with pytest.raises(ConfigError, match="written by the run itself"):
        run.report(step=3)


def test_state_that_cannot_be_kept_is_known_before_the_first_step(begin: Callable[..., Run]) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    run = begin()
    run.register(model=programs.make_model(), odd=Odd())
    with pytest.raises(ConfigError, match=r"odd/lock is a builtins\.object"):
        run.resume()


def test_another_model_is_an_error_and_its_checkpoint_stays_good(begin: Callable[..., Run]) -> None:
    go(begin(), 3)
    run = begin()
    run.register(model=torch.nn.Linear(3, 3))
    with pytest.raises(MismatchedCheckpoint):
        run.resume()
    assert steps_of(run) == [3]
    assert events(run, "exception")[-1]["type"] == "MismatchedCheckpoint"
    assert list(go(begin(), 5)) == [3, 4]


def test_other_data_or_another_batch_is_an_error(begin: Callable[..., Run]) -> None:
    folders = set()

    def with_batches(total: int, **options: Any) -> None:
        run = begin()
        folders.add(run.folder)
        parts = small(run)
        batches = run.batches(101, options.pop("global_batch", 10), 5, **options)
        run.resume()
        for step in run.steps(total):
            list(batches(step))
            one_step(step, *parts)

    with_batches(3, dataset="one")
    with pytest.raises(ConfigError, match="another data set"):
        with_batches(5, dataset="two")
    with pytest.raises(ConfigError, match="a global batch of 10, not 12"):
        with_batches(5, dataset="one", global_batch=12)
    (folder,) = folders
    newest = CheckpointStore.open(folder / "checkpoints").latest()
    assert newest is not None
    assert newest.attempts == 0, "the mistake leaves no mark on the checkpoint, or the next start would prefer an older one"
    with_batches(5, dataset="one")


def test_batches_made_after_resume_stand_at_the_same_place(begin: Callable[..., Run]) -> None:
    run = begin()
    parts = small(run)
    batches = run.batches(23, 10, 5)
    run.resume()
    ids = {step: (one_step(step, *parts), batches.global_ids(step))[1] for step in run.steps(3)}
    assert sorted(sample for row in ids.values() for sample in row) == list(range(23))  # one epoch, its last batch short
    with pytest.raises(ConfigError, match="step 1 were asked for, but the run stands at step 3"):
        batches.global_ids(1)
    again = begin()
    small(again)
    again.resume()
    late = again.batches(23, 10, 5)
    assert late.epoch(3) == 1
    with pytest.raises(ConfigError, match="stands at step 3"):
        late.global_ids(2)


# -- checkpoints that are not as they should be -------------------------------------------------------------------


def newest(run: Run) -> Path:
    store = CheckpointStore.open(run.folder / "checkpoints")
    return store.path(max((entry for entry in store.entries() if entry.usable), key=lambda entry: entry.order))


def flip_a_bit(directory: Path, key: str = "model.0.weight") -> None:
    """Change one bit of one tensor's bytes on disk."""
    item = next(item for item in read_manifest(directory).items if item.key == key)
    path = directory / item.file
    raw = bytearray(path.read_bytes())
    raw[item.data_offset] ^= 1
    path.write_bytes(raw)


def test_a_damaged_checkpoint_is_quarantined_and_the_older_one_taken(begin: Callable[..., Run], tmp_path: Path) -> None:
    whole = go(Run(folder=tmp_path / "other", **EVERY_2), 8)
    go(begin(**EVERY_2), 6)
    run = begin(**EVERY_2)
    flip_a_bit(newest(run))
    second = go(run, 8)
    assert second == {step: whole[step] for step in (4, 5, 6, 7)}
    (rejected,) = events(run, "checkpoint_quarantined")
    assert rejected["step"] == 6
    assert "damaged" in rejected["reason"]
    assert run.resumed is not None
    assert [entry.step for entry, _ in run.resumed.rejected] == [6]


def test_when_none_can_be_trusted_the_run_does_not_start_over(begin: Callable[..., Run]) -> None:
    go(begin(**EVERY_2), 4)
    for directory in (begin().folder / "checkpoints").glob("step-*"):
        flip_a_bit(directory)
    for _ in range(2):  # the second time they are condemned already
        with pytest.raises(NoValidCheckpoint, match=r"(?s)None of the 2 checkpoints .* model\.0\.weight in __0_0\.distcp"):
            go(begin(**EVERY_2), 6)


def bad(name: str) -> Callable[..., Any]:
    def check(restored: verify.Restored) -> Iterator[verify.Check]:
        if restored.entry_step == 4:
            yield verify.equal(name, 1, 2)

    return check


def test_a_check_of_the_users_own_condemns_an_entry(begin: Callable[..., Run]) -> None:
    go(begin(**EVERY_2), 4)
    run = begin(**EVERY_2)
    run.verify_with(bad("my own"))
    go(run, 5)
    (rejected,) = events(run, "checkpoint_quarantined")
    assert rejected["reason"].endswith("my own: expected 1, measured 2")
    assert run.resumed is not None
    assert run.resumed.step == 2


def tamper(run: Run, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Take a checkpoint of step 4 whose digests are all valid and whose content is not what it should be."""
    parts = small(run)
    run.probe(lambda x, y: torch.nn.functional.cross_entropy(parts[0](x), y), *programs.sample(range(4)))
    run.resume()
    assert run._saver is not None
    honest = run._saver.snapshot

    def dishonest(step: int) -> Any:
        taken = honest(step)
        if step == 4:
            taken.tensors = {key: value.clone() for key, value in taken.tensors.items()}
            change(taken.plain, taken.tensors)
        return taken

    run._saver.snapshot = dishonest  # type: ignore[method-assign]
    for step in run.steps(4):
        one_step(step, *parts)


def _nan(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["optimizer.state.model.0.weight.exp_avg"][0, 0] = torch.nan


def _rate(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    plain["optimizers"]["optimizer"]["groups"][0]["numbers"]["lr"] *= 1.001


def _scheduler(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    plain["schedulers"]["scheduler"]["_last_lr"][0] *= 0.9


def _swap(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.3.weight"].copy_(tensors["model.3.weight"].flip(0))


def _step(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    plain["counters"]["step"] = 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_nan, "tensors that are not finite"),
        (_rate, "learning rate of optimizer"),
        (_scheduler, "last learning rate of scheduler"),
        (_swap, "probe loss"),
        (_step, "step: expected 4, measured 3"),
    ],
)
def test_wrong_content_with_right_digests_is_caught_by_name(
    begin: Callable[..., Run], change: Callable[..., None], named: str
) -> None:
    tamper(begin(**EVERY_2), change)
    run = begin(**EVERY_2)
    parts = small(run)
    run.probe(lambda x, y: torch.nn.functional.cross_entropy(parts[0](x), y), *programs.sample(range(4)))
    assert run.resume() == 2
    (rejected,) = events(run, "checkpoint_quarantined")
    assert named in rejected["reason"]


class _Counts(torch.nn.Module):
    """Keeps a buffer that changes with every forward pass, in evaluation mode too."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_the_probe_leaves_no_trace(begin: Callable[..., Run], tmp_path: Path) -> None:
    def with_dropout(run: Run, total: int, probe: bool) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(13, 8), torch.nn.BatchNorm1d(8), _Counts(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 5)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        run.register(model=model, optimizer=optimizer)
        if probe:
            run.probe(
                lambda x, y: torch.nn.functional.cross_entropy(model(x), y) + torch.rand(()) * 0, *programs.sample(range(4))
            )
        run.resume()
        losses = []
        for step in run.steps(total):
            losses.append(one_step(step, model, optimizer, None))
            assert model.training
        return [*losses, *(float(b.sum()) for b in model.buffers())]

    without = with_dropout(Run(folder=tmp_path / "other", **EVERY_2), 6, probe=False)
    assert with_dropout(begin(**EVERY_2), 4, probe=True)[:4] == without[:4]
    assert with_dropout(begin(**EVERY_2), 6, probe=True) == without[4:]


class _Refuses:
    """Takes no state of step ``above`` or later."""

    def __init__(self, above: int) -> None:
        self.above, self.count = above, 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 2
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["count"] > self.above:
            raise ValueError("no")


def test_an_object_that_refuses_condemns_an_entry_only_if_it_takes_an_older_one(begin: Callable[..., Run]) -> None:
    run = begin(**EVERY_2)
    run.register(odd=_Refuses(99))
    go(run, 4)
    run = begin(**EVERY_2)
    run.register(odd=_Refuses(0))
    with pytest.raises(CheckpointError, match="ValueError: no"):
        go(run, 6)
    assert steps_of(run) == [2, 4]
    counts = sorted(
        CheckpointStore.open(run.folder / "checkpoints").manifest(entry).extra["training"]["others"]["odd"]["count"]
        for entry in CheckpointStore.open(run.folder / "checkpoints").entries()
    )
    run = begin(**EVERY_2)
    run.register(odd=_Refuses(counts[0]))
    assert list(go(run, 5)) == [2, 3, 4]
    (rejected,) = events(run, "checkpoint_quarantined")
    assert "while the older" in rejected["reason"]


def block_saves(root: Path) -> None:
    """Put a file where attempt 1 makes its folders."""
    writing = root / ".writing-a00001"
    if writing.is_dir():
        writing.rmdir()
    writing.write_text("in the way")


def test_a_failed_save_costs_that_checkpoint_and_not_the_run(begin: Callable[..., Run]) -> None:
    """And it counts as failed everywhere: no commit is told, no entry is there (prime-rl#1593)."""
    run = begin(**EVERY_2)
    parts = small(run)
    run.resume()
    root = run.folder / "checkpoints"
    for step in run.steps(6):
        one_step(step, *parts)
        if step == 0:
            block_saves(root)
        if step == 2:
            (root / ".writing-a00001").unlink()
            (root / ".writing-a00001").mkdir()
    assert steps_of(run) == [4, 6]
    (failed,) = events(run, "checkpoint_failed")
    assert failed["step"] == 2
    assert failed["error"]


def test_a_complete_run_without_its_last_checkpoint_is_an_error(begin: Callable[..., Run]) -> None:
    run = begin()
    parts = small(run)
    run.resume()
    block_saves(run.folder / "checkpoints")
    steps = run.steps(1)
    one_step(next(steps), *parts)
    with pytest.raises(CheckpointError, match="its last checkpoint could not be taken"):
        next(steps)
    assert events(run, "finished") == []


def test_a_newer_attempt_fences_this_one(begin: Callable[..., Run]) -> None:
    run = begin(**EVERY_2)
    parts = small(run)
    run.resume()
    steps = run.steps(6)
    for step in (0, 1, 2, 3):
        assert next(steps) == step
        one_step(step, *parts)
    assert run._saver is not None
    run._saver.settle()
    CheckpointStore.open(run.folder / "checkpoints", attempt=9).fence()
    with pytest.raises(Fenced, match="attempt 9 owns it now"):
        next(steps)
    assert steps_of(run) == [2]


def test_an_uncaught_exception_is_told_once_with_its_step(begin: Callable[..., Run]) -> None:
    run = begin()
    parts = small(run)
    run.resume()
    shown: list[Any] = []
    try:
        for step in run.steps(6):
            one_step(step, *parts)
            if step == 1:
                raise ValueError("bad sample")
    except ValueError as error:
        run._crashes._before = lambda *args: shown.append(args)
        sys.excepthook(ValueError, error, error.__traceback__)
        run.record_exception(error)
    (told,) = events(run, "exception")
    assert (told["type"], told["message"], told["step"]) == ("ValueError", "bad sample", 1)
    assert "bad sample" in told["traceback"]
    assert len(shown) == 1


def test_what_a_check_draws_is_not_missing_in_training(begin: Callable[..., Run]) -> None:
    """Random generators come last: whatever was drawn until then leaves no trace."""

    def drawn() -> tuple[float, float]:
        return random.random(), float(torch.rand(()))

    run = begin(**EVERY_2)
    go(run, 2)
    expected = drawn()
    again = begin(**EVERY_2)
    small(again)
    drawn()

    def draws(_: Any) -> Iterator[Any]:
        drawn()
        yield from ()

    again.verify_with(draws)
    assert again.resume() == 2
    assert drawn() == expected
