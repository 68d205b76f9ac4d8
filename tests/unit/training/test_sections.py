"""Sections that a script enters, compilation that enters one by itself, and what a step costs a rank by itself."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience.errors import ConfigError
from slurm_resilience.progress.sections import Phase
from slurm_resilience.training.link import LocalLink
from slurm_resilience.training.own_time import OwnTime, meets_in_forward
from slurm_resilience.training.sections import CompileWatch, section
from slurm_resilience.training.world import World
from tests.unit.training import programs
from tests.unit.training.worlds import start


class Link(LocalLink):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []
        self.own_s: list[float] = []

    def push(self, name: str, phase: Phase, limit_s: float) -> None:
        self.said.append((name, phase, limit_s))

    def pop(self) -> None:
        self.said.append("end")

    def own(self, seconds: float) -> None:
        self.own_s.append(seconds)


def test_a_section_says_its_name_phase_and_limit_and_ends_whatever_happens() -> None:
    link = Link()
    with section(link, "eval", 30), pytest.raises(ZeroDivisionError), section(link, "export", None):
        raise ZeroDivisionError
    assert link.said == [("eval", Phase.EVALUATION, 30.0), ("export", Phase.USER, math.inf), "end", "end"]
    with section(link, "data", "auto"):
        pass
    assert link.said[4][:2] == ("data", Phase.DATA)
    assert math.isnan(link.said[4][2])


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), True, "30", "none"])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match="is no limit"), section(Link(), "eval", limit):
        pass


def test_what_another_thread_does_says_nothing_about_the_training_loop() -> None:
    link = Link()

    def work() -> None:
        with section(link, "upload", 5):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert link.said == []


@pytest.fixture
def dynamo_callbacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's own module, without the seconds that all of dynamo takes."""
    path = Path(torch.__file__).parent / "_dynamo" / "callback.py"
    spec = importlib.util.spec_from_file_location("torch._dynamo.callback", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    spec.loader.exec_module(module)
    return module


def test_compilation_is_a_section_without_a_word(dynamo_callbacks: Any) -> None:
    link, began = Link(), []
    watch = CompileWatch(link, began=lambda: began.append(1))
    watch.look()
    watch.look()
    trigger = dynamo_callbacks.CallbackTrigger.DYNAMO
    with dynamo_callbacks.callback_handler.install_callbacks(trigger, "0/0"):
        assert [each[:2] for each in link.said] == [("compile", Phase.COMPILE)]
    assert link.said[1:] == ["end"]
    assert began == [1]
    watch.forget()
    with dynamo_callbacks.callback_handler.install_callbacks(trigger, "0/1"):
        pass
    assert len(link.said) == 2


def test_without_dynamo_nothing_is_watched_and_nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.callback", raising=False)
    watch = CompileWatch(Link(), began=lambda: None)
    watch.look()
    watch.forget()
    assert "torch._dynamo.callback" not in sys.modules


def test_own_time_runs_from_the_optimizers_step_to_the_end_of_the_next_forward_pass() -> None:
    link, world = Link(), World()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnTime(link, world)
    own.install([model], [optimizer])
    model(torch.ones(2)).backward()  # nothing has begun yet
    assert link.own_s == []
    began = time.monotonic()
    optimizer.step()
    time.sleep(0.1)
    with world.waiting():
        waits = time.monotonic()
        time.sleep(0.5)  # a collective of ours
        waited = time.monotonic() - waits
    model(torch.ones(2))
    own_and_waited = time.monotonic() - began
    model(torch.ones(2))  # the second micro-batch
    assert len(link.own_s) == 1
    assert 0.1 <= link.own_s[0] <= own_and_waited - waited
    optimizer.step()
    own.skip()  # a checkpoint came in between
    model(torch.ones(2))
    own.remove()
    optimizer.step()
    model(torch.ones(2))
    assert len(link.own_s) == 1


def test_whose_forward_pass_is_a_meeting() -> None:
    class FSDPModule(torch.nn.Module): ...

    class DistributedDataParallel(torch.nn.Module): ...

    assert meets_in_forward(FSDPModule())
    assert meets_in_forward(torch.nn.Sequential(torch.nn.Linear(1, 1), FSDPModule()))
    assert not meets_in_forward(torch.nn.BatchNorm1d(3))
    replicated = DistributedDataParallel()
    assert not meets_in_forward(replicated)
    replicated.norm = torch.nn.BatchNorm1d(3)
    assert meets_in_forward(replicated)


def test_the_time_between_steps_is_measured_where_parameters_are_sharded(tmp_path: Path) -> None:
    """Rank 1 takes a quarter of a second more between its steps, which whole steps do not show."""
    started = start(2, programs.train_slow, 1000, run_dir=tmp_path, settings={"checkpoint": {"every_min": None}})
    started.until(lambda: all(one.own_count >= 8 for one in started.progress()))
    slow = started.progress()[1]
    for page in started.pages:
        page.order(stop=True, cause="cancelled")
    started.results()
    assert slow.own_s > 0.25
