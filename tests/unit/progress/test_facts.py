"""Facts arrive whole and in order, a rank never hangs on an agent that does not read, and nonsense is named."""

from __future__ import annotations

import math
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.progress.facts import MAX_BYTES, FactReceiver, FactSender


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: a socket's address has 107 bytes."""
    folder = Path("/tmp") / f"srf-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir(mode=0o700)
    yield folder / "facts"
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def test_facts_arrive_in_order_with_who_says_them(path: Path) -> None:
    receiver = FactReceiver(path)
    sender = FactSender(path, attempt=3, rank=1)
    assert receiver.receive() == []
    assert sender.send("first_step", step=1, loss=2.5)
    assert sender.send("stopped", step=2, why="ä\n")
    assert receiver.receive() == [
        {"kind": "first_step", "attempt": 3, "rank": 1, "fields": {"step": 1, "loss": 2.5}},
        {"kind": "stopped", "attempt": 3, "rank": 1, "fields": {"step": 2, "why": "ä\n"}},
    ]
    assert receiver.receive() == []
    receiver.close()
    assert not path.exists()


def test_a_loss_that_is_not_a_number_is_a_fact_too(path: Path) -> None:
    receiver = FactReceiver(path)
    assert FactSender(path, attempt=1, rank=0).send("step_reported", loss=math.nan, grad_norm=math.inf)
    (fact,) = receiver.receive()
    assert math.isnan(fact["fields"]["loss"])
    receiver.close()


def test_without_an_agent_the_rank_goes_on(path: Path) -> None:
    sender = FactSender(path, attempt=1, rank=0)
    assert sender.send("first_step", step=1) is False
    receiver = FactReceiver(path)
    assert sender.send("first_step", step=2)
    assert [fact["fields"]["step"] for fact in receiver.receive()] == [2]
    receiver.close()
    assert sender.send("first_step", step=3) is False


def test_an_agent_that_does_not_read_costs_a_second_and_not_the_run(path: Path) -> None:
    receiver = FactReceiver(path)
    sender = FactSender(path, attempt=1, rank=0)
    sent = 0
    began = time.monotonic()
    while sender.send("noise", text="x" * 50_000):
        sent += 1
        assert sent < 10_000
    assert time.monotonic() - began < 10
    assert sent > 0
    assert len(receiver.receive()) == sent
    receiver.close()


def test_a_fact_that_is_too_big_is_an_error_at_once(path: Path) -> None:
    receiver = FactReceiver(path)
    with pytest.raises(ValueError, match="over the limit"):
        FactSender(path, attempt=1, rank=0).send("exception", traceback="x" * MAX_BYTES)
    receiver.close()


def test_nonsense_is_named_and_does_not_hide_what_follows(path: Path) -> None:
    receiver = FactReceiver(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for raw in (b"\xff\xfe", b"", b"[]", b"{}", b'{"kind": 1}', b"{" * 1000):
            stranger.sendto(raw, str(path))
    FactSender(path, attempt=1, rank=0).send("finished", step=9)
    facts = receiver.receive()
    assert [fact["kind"] for fact in facts] == ["garbage"] * 6 + ["finished"]
    assert facts[0]["fields"] == {"bytes": 2}
    receiver.close()


def test_the_socket_belongs_to_its_user_alone_and_replaces_a_leftover(path: Path) -> None:
    path.write_text("left by a crash")
    receiver = FactReceiver(path)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    receiver.close()
