"""Messages survive the wire, nonsense is named as such, and no peer can block or break a connection's reader."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.wire import MAX_UNSENT_BYTES, Connection

HELLO: dict[str, Any] = {
    "node": "n1", "pid": 7, "boot_id": "b", "job_id": "12", "restart": 1, "address": "10.0.0.1", "warm": True,
    "cold_reason": "", "attempt": 3, "ranks": [4, 5],
}  # fmt: skip
EXAMPLES: list[m.Message] = [
    m.Hello.build("t", **HELLO),
    m.Warm(True, "", 1.5),
    m.Beat(3, 2, {"0": [5, 2, 0.1, False, 0.2]}),
    m.Seen(2, {"step": [12, 0.3]}),
    m.Looked(2, {"0": {"state": "S", "stacks": "…"}}, ["[1.0] Out of memory"], 0.4),
    m.StoreReady(1, 4711),
    m.StoreFailed(1, "no torch"),
    m.Launched(1, {"0": 99}, False, "why", 0.1),
    m.LaunchFailed(1, "no room"),
    m.Exit(1, 0, -9, "SIGKILL", False, 1.0, ["last"], 7, "the kernel says so"),
    m.Fact(1, 0, "first_step", {"loss": float("inf"), "ä": None}, 2.0),
    m.Warned("SIGTERM", 3.0),
    m.Stopped(1, 4, 0.1, "kill"),
    m.Refused("launch", 1, "old"),
    m.Welcome.build("t", m.Hello.build("t", **HELLO)),
    m.Ping(3),
    m.Store(1),
    m.Launch(1, 2, [[0, 0], [1, 1]], 0, 1, "10.0.0.1", 5, ["python", "x.py"], "/w", {"A": None}, "/c", {}, {"mesh": {"dp": 2}}),
    m.Order(1, True, 2, None, "preemption"),
    m.Hint(4, "hang", 1.5),
    m.Kill(1, 2.5, "ranks"),
    m.Quit("done"),
]


def pair() -> tuple[Connection, Connection]:
    one, other = socket.socketpair()
    return Connection(one), Connection(other)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == {*m.FROM_AGENT, *m.FROM_SUPERVISOR}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    one, other = pair()
    one.send(message)
    assert other.receive() == [message]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_fields_that_a_newer_peer_adds_are_passed_over_and_missing_ones_are_named(message: m.Message) -> None:
    raw = json.loads(message.to_line())
    assert m.parse(json.dumps({**raw, "from_the_future": 1}).encode()) == message
    for field in dataclasses.fields(message):
        without = {name: value for name, value in raw.items() if name != field.name}
        found = m.parse(json.dumps(without).encode())
        if field.default is dataclasses.MISSING:
            assert isinstance(found, m.Garbage)
            assert field.name in found.why
        else:
            assert isinstance(found, type(message))
        wrong = m.parse(json.dumps({**raw, field.name: {"not": ["it"]} if field.type != "dict[str, Any]" else 3}).encode())
        assert isinstance(wrong, m.Garbage)


def test_a_bool_is_no_number_and_a_number_no_bool() -> None:
    assert isinstance(m.parse(b'{"m":"ping","seen":true}'), m.Garbage)
    assert isinstance(m.parse(b'{"m":"warm","warm":1,"reason":"","seconds":0}'), m.Garbage)
    assert m.parse(b'{"m":"kill","attempt":1,"grace_s":2}') == m.Kill(1, 2)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["m", "v", "attempt", "seen"]), inner | st.sampled_from(["ping", "beat", "kill"]))
    ),
)


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_line_raises(line: bytes) -> None:
    assert isinstance(m.parse(line), m.Message)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_lines_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    raw = b"".join(message.to_line() for message in EXAMPLES)
    left, right = socket.socketpair()
    reader = Connection(right)
    seen: list[m.Message] = []
    for cut in cuts:
        left.sendall(raw[:cut])
        raw = raw[cut:]
        seen += reader.receive()
    left.sendall(raw)
    assert seen + reader.receive() == EXAMPLES
    left.close()
    reader.close()


def test_what_came_before_the_end_is_still_read() -> None:
    one, other = pair()
    one.send(m.Ping(1))
    one.socket.sendall(b'{"m":"ping"')
    one.close()
    assert other.receive() == [m.Ping(1)]
    assert other.closed == "the peer closed the connection"


def test_a_line_over_the_limit_is_neither_sent_nor_swallowed() -> None:
    one, other = pair()
    fact = m.Fact(1, 0, "x", {"text": "y" * m.MAX_LINE_BYTES}, 0.0)
    with pytest.raises(m.WireError, match="over the limit"):
        one.send(fact)
    one._out += b'"' + b"z" * (2 * m.MAX_LINE_BYTES)
    while other.closed is None:
        one.flush()
        other.receive()
    assert "a line of more than" in other.closed
    assert len(other._in) < 5 * m.MAX_LINE_BYTES
    # a whole line that is too long, too, when it arrives at once
    one, other = pair()
    one._out += b'{"m":"ping","seen":1,"x":"' + b"z" * m.MAX_LINE_BYTES + b'"}\n' + m.Ping(2).to_line()
    seen: list[m.Message] = []
    while one.wants_write and other.closed is None:
        one.flush()
        seen += other.receive()
    seen += other.receive()
    assert m.Ping(1) not in seen


def test_a_peer_that_reads_nothing_never_blocks_the_sender_and_is_given_up() -> None:
    one, _other = pair()
    fact = m.Fact(1, 0, "x", {"text": "y" * 500_000}, 0.0)
    for _ in range(2 * MAX_UNSENT_BYTES // 500_000):
        one.send(fact)
    assert one.closed is not None
    assert "unread" in one.closed
    assert not one.wants_write


def test_a_slow_reader_gets_everything_in_order() -> None:
    one, other = pair()
    for step in range(3000):
        one.send(m.Fact(1, 0, "x", {"step": step, "pad": "y" * 1000}, 0.0))
    assert one.wants_write
    seen: list[m.Message] = []
    while len(seen) < 3000:
        one.flush()
        seen += other.receive()
    assert [fact.fields["step"] for fact in seen if isinstance(fact, m.Fact)] == list(range(3000))


def test_only_what_makes_sense_counts_as_heard() -> None:
    class Clock:
        now = 5.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return 0.0

    one, other = socket.socketpair()
    clock = Clock()
    connection = Connection(other, clock=clock)
    clock.now = 6.0
    one.sendall(b"nonsense\n")
    connection.receive()
    assert connection.last_heard == 5.0
    one.sendall(m.Beat(9, 1, {}).to_line() + m.Beat(8, 1, {}).to_line())
    connection.receive()
    assert (connection.last_heard, connection.seen) == (6.0, 9)


def test_both_sides_prove_that_they_know_the_token_without_sending_it() -> None:
    hello = m.Hello.build("token-1", **HELLO)
    assert b"token-1" not in hello.to_line()
    assert hello.proves("token-1")
    assert not hello.proves("token-2")
    assert not dataclasses.replace(hello, node="n2").proves("token-1"), "a proof is good for one node only"
    welcome = m.Welcome.build("token-1", hello)
    assert welcome.proves("token-1", hello)
    assert not welcome.proves("token-2", hello)
    assert not welcome.proves("token-1", m.Hello.build("token-1", **HELLO)), "an old welcome is no answer to a new hello"
    assert not m.Welcome(1, hello.proof).proves("token-1", hello), "a hello's own proof is no answer"
    assert not m.Welcome(1, "ä").proves("token-1", hello)


def test_the_address_is_private_whole_and_numeric(tmp_path: Path) -> None:
    address = SupervisorAddress(2, "10.0.0.1", 4711, "t", 9, "b", "12", 1, others=["fe80::1"])
    assert SupervisorAddress.read(tmp_path) is None
    address.write(tmp_path)
    assert SupervisorAddress.read(tmp_path) == address
    assert stat.S_IMODE(os.stat(tmp_path / "supervisor.json").st_mode) == 0o600
    with pytest.raises(m.WireError, match="must be numeric"):
        dataclasses.replace(address, host="node1.cluster").write(tmp_path)
    path = tmp_path / "supervisor.json"
    good = json.loads(path.read_text())
    for bad in ({**good, "v": 99}, {**good, "host": "node1"}, {k: v for k, v in good.items() if k != "token"}, [], None, "x"):
        path.write_text(json.dumps(bad))
        if bad is None:
            assert SupervisorAddress.read(tmp_path) is None
            continue
        with pytest.raises(m.WireError):
            SupervisorAddress.read(tmp_path)
    path.write_text('{"v": 1, "ho')
    with pytest.raises(m.WireError):
        SupervisorAddress.read(tmp_path)
