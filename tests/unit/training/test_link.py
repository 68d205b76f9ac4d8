from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.errors import FormatError
from slurm_resilience.observe.events import read_events
from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.facts import FactReceiver
from slurm_resilience.progress.page import PageReader
from slurm_resilience.training import link


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[PageReader, FactReceiver, link.AgentLink]]:
    page, facts = Path("/dev/shm") / f"sr-link-{os.getpid()}", Path("/tmp") / f"sr-link-{os.getpid()}.sock"
    reader, receiver = PageReader(page), FactReceiver(facts)
    contract = RankContract(str(tmp_path), "r", 1, 0, "1", "n", str(page), str(facts), str(tmp_path), {}, {})
    yield reader, receiver, link.AgentLink(contract, 0)
    reader.close()
    receiver.close()


def test_an_agent_that_does_not_listen_for_a_while_loses_no_fact_and_costs_one_second(
    agent: tuple[PageReader, FactReceiver, link.AgentLink],
) -> None:
    reader, receiver, mine = agent
    began = time.monotonic()
    sent = [mine.send("checkpoint_committed", step=step) for step in range(40)]
    assert sent.index(False) == sum(sent)  # once it was not heard, no more was tried
    mine.send("step_reported", step=40)
    assert time.monotonic() - began < 10  # one second for each of the thirty that were not heard would be more
    heard = receiver.receive()
    assert len(heard) == sum(sent)
    while not reader.read().done:
        mine._not_before_s = 0.0
        mine.send("step_reported", step=41)
        heard += receiver.receive()
        if not mine._untold:
            mine.done()
    assert [fact["fields"]["step"] for fact in heard if fact["kind"] == "checkpoint_committed"] == list(range(40))


def test_a_fact_that_is_too_long_is_shortened_at_its_beginning(agent: tuple[PageReader, FactReceiver, link.AgentLink]) -> None:
    _, receiver, mine = agent
    assert mine.send("exception", traceback="x" * 100_000 + "the end", step=3)
    (fact,) = receiver.receive()
    assert fact["fields"]["traceback"].endswith("the end")
    assert fact["fields"]["step"] == 3


def test_attempts_without_a_supervisor_are_numbered_upwards(tmp_path: Path) -> None:
    assert [link.claim_attempt(tmp_path / "run") for _ in range(3)] == [1, 2, 3]
    (tmp_path / "run" / "attempt").write_text("three")
    with pytest.raises(FormatError, match="does not hold an attempt number"):
        link.claim_attempt(tmp_path / "run")


def test_a_run_keeps_its_description(tmp_path: Path) -> None:
    first = link.describe_run(tmp_path, {"seed": 1, "global_batch": None})
    assert link.describe_run(tmp_path, {"seed": 2}) == first
    assert json.loads((tmp_path / "run.json").read_text())["config"] == {"seed": 1}


def test_without_an_agent_rank_0_writes_the_events(tmp_path: Path) -> None:
    mine = link.LocalLink()
    assert not mine.send("exception", message="before it was opened")
    mine.open(tmp_path, attempt=4, world=2)
    assert mine.send("finished", step=9)
    assert [(fact["attempt"], fact["event"], fact.get("step")) for fact in read_events(tmp_path)] == [
        (4, "attempt_started", None),
        (4, "finished", 9),
        (4, "run_completed", 9),
    ]
