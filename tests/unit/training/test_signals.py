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
from slurm_resilience.training import children
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
    asked.wait(200)
    answer.put(flags.seen(*WATCHED))


def test_a_forked_child_survives_what_is_not_meant_for_it_and_takes_no_note(flags: SignalFlags) -> None:
    context = multiprocessing.get_context("fork")
    ready, asked, answer = context.Event(), context.Event(), context.SimpleQueue()
    child = context.Process(target=_child, args=(flags, ready, asked, answer))
    child.start()
    assert ready.wait(100)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGUSR2)
    asked.set()
    child.join(100)
    assert child.exitcode == 0
    assert answer.get() is False
    assert not flags.seen(*WATCHED)


def _nap(ready: Any, handler: Any, inherits: bool) -> None:
    if not inherits:
        signal.signal(children.END, signal.SIG_DFL)
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    ready.set()
    time.sleep(300)


def _leave_with_7(number: int, frame: Any) -> None:
    time.sleep(0.3)  # cleans up; must not be killed meanwhile
    os._exit(7)


@pytest.mark.parametrize(
    ("handler", "inherits", "code"), [(None, True, -signal.SIGTERM), (_leave_with_7, True, 7), (_leave_with_7, False, 7)]
)
def test_terminate_ends_a_child_as_ever(flags: SignalFlags, handler: Any, inherits: bool, code: int) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_nap, args=(ready, handler, inherits), daemon=True)
    child.start()
    assert ready.wait(20)
    child.terminate()
    child.join(20)
    try:
        assert child.exitcode == code
    finally:
        child.kill()


def test_a_second_signal_goes_only_to_who_waits_for_it(flags: SignalFlags) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not children._waits_for_end(other.pid)
        other.kill()
    assert not children._waits_for_end(other.pid)
    assert children._waits_for_end(os.getpid())


ENDING = """
import multiprocessing, sys, torch
from slurm_resilience import Run
from slurm_resilience.training import protect_worker

how = sys.argv[2]
if __name__ == "__main__":
    run = Run(folder=sys.argv[1])
    if how == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
    else:
        init = protect_worker if how == "spawn" else None
        loader = torch.utils.data.DataLoader(
            range(100), num_workers=2, persistent_workers=True, multiprocessing_context=how, worker_init_fn=init
        )
        rows = iter(loader)  # a global, which nobody closes: its workers live until the interpreter ends them
        print(next(rows))
    if sys.argv[3] == "close":
        run.close()
    print("END", flush=True)
"""


@pytest.mark.parametrize(("how", "then"), [("fork", "close"), ("pool", ""), pytest.param("spawn", "", marks=pytest.mark.long)])
def test_a_script_with_children_ends(tmp_path: Path, how: str, then: str) -> None:
    (tmp_path / "script.py").write_text(ENDING)
    ended = subprocess.run(
        [sys.executable, "script.py", "run", how, then], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert ended.stdout.endswith("END\n")
    assert ended.returncode == 0
    assert ended.stderr == ""


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
            # torch says so, unless it was just fetching a row's memory from the one that died
            with pytest.raises((RuntimeError, EOFError, ConnectionError, FileNotFoundError)):
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
        out, _ = training.communicate(timeout=300)
    said = "".join(lines) + out
    assert training.returncode == 0, said[-5000:]
    assert "reentrant" not in said
    assert "Traceback" not in said
    end, outcome, step = out.splitlines()[-1].split()
    assert (end, outcome) == ("end", "stopped")
    entries = CheckpointStore.open(tmp_path / "run" / "checkpoints").entries()
    assert max(entry.step for entry in entries) == int(step)
    assert {str(entry.state) for entry in entries} <= {"committed", "verified"}
