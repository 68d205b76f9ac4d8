"""What thousands of nodes cost the supervisor grows with their number and no faster: counted in bytes and instructions."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import slurm_resilience
from slurm_resilience.progress.packed import FEWEST_NODES, pack, unpack
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.states import State
from tests.unit.runtime.stage import Stage

OURS = str(Path(slurm_resilience.__file__).parent)
FEW, MANY = 50, 1600
BEAT_EVERY = 20  # turns of 0.1 s


class Instructions:
    """Counts what the interpreter executes of the package; each turn of a comprehension is some."""

    def __enter__(self) -> Instructions:
        self.count = 0
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += event == "opcode"
        return self._opcode


class Turns:
    """Feeds a coordinator as the supervisor's loop does: all that came in one turn, then one tick."""

    def __init__(self, nodes: int) -> None:
        self.stage = Stage(nodes, nodes=(1, nodes - 1), global_batch=nodes * 4, micro_batch=1)
        self.coordinator = self.stage.coordinator
        self.conns = {name: number for number, name in enumerate(self.stage.names, 1)}
        self.longest: list[int] = []
        self._of_conn = {number: name for name, number in self.conns.items()}
        self._ranks: dict[str, list[int]] = {}
        self._beats = 0
        self._next: list[i.Input] = []
        self._do(self.coordinator.start())

    def until(self, state: State) -> None:
        """Turns of a tenth of a second, in which agents beat now and then, until the coordinator is in ``state``."""
        for _ in range(300):
            if self.coordinator.state is state:
                return
            self.turn()
        raise AssertionError(f"still {self.coordinator.state}")

    def turn(self, *more: i.Input) -> None:
        self._beats += 1
        inputs, self._next = [*self._next, *more], []
        for name, conn in self.conns.items() if self._beats % BEAT_EVERY == 0 else ():
            ranks = {str(rank): [10, 2, 0.1, False, 0.1, 7, [], 0.1, 50, 0.0] for rank in self._ranks.get(name, ())}
            inputs.append(i.Heard(conn, m.Beat(self._beats, self.coordinator.number if ranks else 0, ranks)))
        self.stage.clock.pass_(0.1)
        for heard in (i.Tick(), *inputs, i.Tick()):
            self._do(self.coordinator.handle(heard))

    def joins(self) -> list[i.Input]:
        hello: dict[str, Any] = {"boot_id": "b", "job_id": "7", "restart": 0, "address": "h", "warm": True, "cold_reason": ""}
        return [
            i.Joined(conn, m.Hello.build("t", node=name, pid=conn, attempt=self.coordinator.number, ranks=ranks, **hello))
            for name, conn in self.conns.items()
            for ranks in [self._ranks.get(name, [])]
        ]

    def _do(self, outputs: list[i.Output]) -> None:
        for output in outputs:
            match output:
                case i.WriteAttempt(number):
                    self._next.append(i.AttemptWritten(number))
                    self.longest.append(0)
                case i.Send(conn, message) if conn in self._of_conn:
                    self._next += [i.Heard(conn, said) for said in self._answer(self._of_conn[conn], message)]

    def _answer(self, name: str, message: m.Message) -> list[m.Message]:
        match message:
            case m.Store(attempt):
                return [m.StoreReady(attempt, 1)]
            case m.Launch(attempt):
                self.longest[-1] = max(self.longest[-1], len(message.to_line()))
                self._ranks[name] = [rank for rank, _ in message.ranks]
                return [m.Launched(attempt, {}, True, "", 0.01)]
            case m.Kill(attempt):
                ranks, self._ranks[name] = self._ranks.get(name, []), []
                ends = [m.Exit(attempt, rank, -9, "SIGKILL", False, self.stage.clock.wall, [], 10) for rank in ranks]
                return [*ends, m.Stopped(attempt, 1, 0.01, "kill")]
        return []


def life(nodes: int) -> tuple[int, list[int]]:
    """All agents join, a node is lost, the rest is launched anew and dials again.

    Instructions that were executed; the length of the longest order to launch of each attempt.
    """
    with Instructions() as instructions:
        turns = Turns(nodes)
        turns.turn(*turns.joins())
        turns.until(State.RUNNING)
        turns.turn(i.Parted(turns.conns.pop("n2"), "closed"))
        turns.until(State.STOPPING)
        turns.until(State.RUNNING)
        turns.turn(*turns.joins())
    return instructions.count, turns.longest


def test_a_launch_and_a_relaunch_cost_each_node_the_same_among_few_and_among_many() -> None:
    few, (few_first, few_second) = life(FEW)
    many, (many_first, many_second) = life(MANY)
    assert many / MANY < 1.1 * few / FEW, (few, many)
    assert many_first < few_first + 100
    assert many_second < few_second + 300  # one node is missing, so names and shares come in more runs than one


def test_every_answer_to_a_beat_is_what_the_encoder_would_write() -> None:
    for number in (0, 7, 10**12):
        ping = m.Ping(number)
        assert ping.to_line() == m.Message.to_line(ping)
        assert m.parse(ping.to_line()) == ping


NAMES = st.lists(
    st.from_regex(r"\A[a-z\u0660-\u0669-]{0,3}[0-9]{0,4}[a-z]?\Z").filter(bool)
    | st.integers(0, 300).map(lambda number: f"gpu-{number:04d}"),
    unique=True,
    max_size=150,
)


@given(NAMES, st.randoms(use_true_random=False))
def test_a_plan_is_the_same_after_it_was_packed(names: list[str], choose: random.Random) -> None:
    plan = {
        "ranks": 5, "nodes": names, "ranks_per_node": [choose.choice([8, 8, 4]) for _ in names], "mesh": {"dp_shard": 4},
        "samples_per_dp_rank": choose.choice([None, [4] * len(names)]), "spare_gpus": dict.fromkeys(names[::2], 8),
        "left_out": dict.fromkeys(names[:2], "down"), "excused_attempts": [1, 2], "reason": "x",
    }  # fmt: skip
    packed = pack(plan)
    assert unpack(packed) == plan
    assert list(unpack(packed)["spare_gpus"]) == list(plan["spare_gpus"])  # type: ignore[call-overload]
    assert pack(packed) == packed
    assert unpack(plan) == plan
    assert ("packed" in packed) == (len(names) >= FEWEST_NODES)


def test_a_large_plan_fits_into_one_variable_of_the_environment() -> None:
    """128 KiB, source: execve(2), MAX_ARG_STRLEN."""
    from slurm_resilience.progress.contract import RankContract

    nodes = 20_000
    plan = {
        "ranks": nodes * 8, "nodes": [f"cluster-gpu-{n:05d}" for n in range(nodes)], "ranks_per_node": [8] * nodes,
        "samples_per_dp_rank": [4] * nodes * 8,
    }  # fmt: skip
    contract = RankContract("/r", "r", 1, 0, "1", "n", "/p", "/f", "/c", {}, plan)
    environment = contract.to_environment()
    assert max(map(len, environment.values())) < 1000
    assert RankContract.from_environment(environment) == contract
