from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.training.signals import WATCHED, SignalFlags, protect_worker


@pytest.fixture
def flags() -> Iterator[SignalFlags]:
    made = SignalFlags()
    assert made.install()
    yield made
    made.restore()


def test_a_signal_sets_a_flag_and_nothing_else(flags: SignalFlags) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert flags.seen(signal.SIGUSR2, signal.SIGTERM)
    assert not flags.seen(signal.SIGTERM)
    flags.forget(signal.SIGUSR2)
    assert not flags.seen(*WATCHED)


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in WATCHED]
    flags = SignalFlags()
    flags.install()
    assert all(signal.getsignal(number) not in before for number in WATCHED)
    flags.restore()
    assert [signal.getsignal(number) for number in WATCHED] == before


def test_a_handler_that_somebody_installed_since_stays() -> None:
    flags = SignalFlags()
    flags.install()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    flags.restore()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_runs_that_end_in_another_order_leave_nothing_behind() -> None:
    before = [signal.getsignal(number) for number in WATCHED]
    first, second = SignalFlags(), SignalFlags()
    first.install()
    second.install()
    first.restore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert second.seen(signal.SIGTERM)
    second.restore()
    assert [signal.getsignal(number) for number in WATCHED] == before


def _child(flags: SignalFlags, ready: Any, asked: Any, answer: Any) -> None:
    ready.set()
    asked.wait(30)
    answer.put(flags.seen(*WATCHED))


def test_a_forked_child_survives_what_is_not_meant_for_it_and_takes_no_note(flags: SignalFlags) -> None:
    context = multiprocessing.get_context("fork")
    ready, asked, answer = context.Event(), context.Event(), context.SimpleQueue()
    child = context.Process(target=_child, args=(flags, ready, asked, answer))
    child.start()
    assert ready.wait(10)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGUSR2)
    asked.set()
    child.join(30)
    assert child.exitcode == 0
    assert answer.get() is False
    assert not flags.seen(*WATCHED)


class _Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


@pytest.mark.parametrize("by", ["the run", "protect_worker", "nobody"])
def test_a_loader_survives_the_signals_of_the_step_only_when_protected(by: str) -> None:
    """KempnerForge#177.  A loader that the user made before there was a Run is protected, too."""
    loader = DataLoader(
        _Slow(), batch_size=1, num_workers=2, prefetch_factor=1, multiprocessing_context="fork",
        worker_init_fn=protect_worker if by == "protect_worker" else None,
    )  # fmt: skip
    flags = SignalFlags()
    if by == "the run":
        assert flags.install()
    else:  # two runs that are over, the first one first
        over = SignalFlags(), SignalFlags()
        for one in over:
            one.install()
        for one in over:
            one.restore()
    try:
        rows = iter(loader)
        first = next(rows)
        second = next(rows)
        pids = {int(first[0, 1]), int(second[0, 1])}
        for pid in pids:
            for number in (signal.SIGTERM, *([signal.SIGUSR1, signal.SIGUSR2] if by != "nobody" else [])):
                os.kill(pid, number)
        if by != "nobody":
            assert [int(row[0, 0]) for row in rows] == [2, 3, 4, 5, 6, 7]
        else:
            with pytest.raises(RuntimeError, match="worker"):
                list(rows)
    finally:
        flags.restore()


def test_what_torch_had_comes_back() -> None:
    from torch.utils.data._utils import signal_handling

    before = signal_handling._set_worker_signal_handlers
    flags = SignalFlags()
    flags.install()
    assert signal_handling._set_worker_signal_handlers is not before
    flags.restore()
    assert signal_handling._set_worker_signal_handlers is before


# Saves and logs all the time, so that a signal can hardly come at another moment.  Its lines are long and the reader is slow:
# a write into a full pipe is what Python interrupts to run a handler, and what cannot be entered twice.
SAVING = """
import logging, sys, torch
logging.basicConfig(level=logging.DEBUG)
from slurm_resilience import Run
run = Run(folder=sys.argv[1], checkpoint={"every_steps": 1})
model = torch.nn.Linear(64, 64)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
run.resume()
for step in run.steps(1_000_000):
    logging.info("in step %d %s", step, "x" * 20000)
    print("x" * 20000)
    run.report(loss=1.0)
    print("step", step, flush=True)
print("end", run.outcome, run.step, flush=True)
"""


@pytest.mark.long
def test_signals_in_the_middle_of_saves_and_log_lines(tmp_path: Path) -> None:
    """Lightning#21406: died in mid-save.  submitit#1714: "reentrant call" of a log line inside the handler."""
    with subprocess.Popen(
        [sys.executable, "-c", SAVING, str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as training:
        assert training.stdout is not None
        lines = [next(line for line in training.stdout if line.startswith("step"))]
        for number in range(600):
            training.send_signal(signal.SIGUSR1 if number % 2 else signal.SIGCONT)
            time.sleep(0.001)
            if number % 5 == 0:
                lines.append(training.stdout.readline())
        training.send_signal(signal.SIGTERM)
        training.send_signal(signal.SIGUSR2)
        out, _ = training.communicate(timeout=120)
    said = "".join(lines) + out
    assert training.returncode == 0, said[-5000:]
    assert "reentrant" not in said
    assert "Traceback" not in said
    end, outcome, step = out.splitlines()[-1].split()
    assert (end, outcome) == ("end", "stopped")
    entries = CheckpointStore.open(tmp_path / "run" / "checkpoints").entries()
    assert max(entry.step for entry in entries) == int(step)
    assert {str(entry.state) for entry in entries} <= {"committed", "verified"}
