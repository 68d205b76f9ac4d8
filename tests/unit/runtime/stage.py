"""A stage for the coordinator: a clock that only moves when told, agents that answer at once, and a Slurm of plain values.

It plays the other side of every output, so that a test reads as what happened and what became of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.coordinator import Coordinator
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.spec import RunSpec, Takeover
from slurm_resilience.runtime.states import State
from slurm_resilience.slurm.cause import Verdict
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.timeleft import Deadline

STEP_S = 0.1


@dataclass
class Clock:
    """Both clocks of a machine; ``jump`` moves the wall clock alone."""

    mono: float = 1000.0
    wall: float = 1_800_000_000.0

    def monotonic(self) -> float:
        return self.mono

    def time(self) -> float:
        return self.wall

    def pass_(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds


@dataclass
class Agent:
    """One agent as the supervisor could meet it.  ``mute``: it hears and says nothing, its connection stays."""

    node: str
    pid: int
    conn: int | None = None
    attempt: int = 0
    ranks: list[int] = field(default_factory=list)
    warm: bool = True
    mute: bool = False
    alive: bool = True
    stubborn: bool = False
    orders: list[m.Order] = field(default_factory=list)
    launches: list[m.Launch] = field(default_factory=list)
    hints: list[m.Hint] = field(default_factory=list)
    beats: int = 0
    progress: dict[int, list[Any]] = field(default_factory=dict)


def job_record(**changes: Any) -> JobRecord:
    """A running job of four nodes, as scontrol prints it, with changes by scontrol's names."""
    fields = {
        "JobId": "7", "JobName": "train", "UserId": "alice(1000)", "GroupId": "alice(1000)", "JobState": "RUNNING",
        "Reason": "None", "Requeue": "1", "Restarts": "0", "NodeList": "n[1-4]", "BatchHost": "n1", "NumNodes": "4",
        "Partition": "low", **changes,
    }  # fmt: skip
    return JobRecord.parse(" ".join(f"{key}={value}" for key, value in fields.items()))


class Stage:
    """Four nodes n1..n4 unless told otherwise."""

    def __init__(
        self,
        count: int = 4,
        *,
        history: History | None = None,
        attempt: int = 0,
        restarted: bool = False,
        takeover: Takeover | None = None,
        has_slurm: bool = True,
        spec: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.clock = Clock()
        self.config = ResilienceConfig.build({"nodes": (1, count), "node_check": "off", **config})
        self.names = tuple(f"n{number}" for number in range(1, count + 1))
        values = {"job_id": "7", "restart": 0, "has_slurm": has_slurm, "can_requeue": has_slurm, **(spec or {})}
        self.spec = RunSpec(("python", "t.py"), "/w", {}, "/r/checkpoints", {}, **values)
        self.coordinator = Coordinator(
            self.spec,
            self.config,
            self.names,
            clock=self.clock,
            history=history or History(),
            attempt=attempt,
            restarted=restarted,
            takeover=takeover,
        )
        self.agents: dict[str, Agent] = {}
        self.events: list[dict[str, Any]] = []
        self.outputs: list[i.Output] = []
        self.statuses: list[Any] = []
        self.requeues: list[i.Requeue] = []
        self.started: list[str] = []
        self.exit_code: int | None = None
        self.written: list[int] = []
        self.write_attempts = True
        self.auto_start = True
        self.startable: Callable[[str], bool] = lambda node: True
        self.verdict: Callable[[], Verdict] = lambda: self._verdict(Cause.UNKNOWN)
        self.slurm_answers = True
        self.drained: dict[str, str] = {}
        self.room: int | None = 4
        self.maintenance_at: float | None = None
        self.requeue_ok = True
        self.deaf_to_quit: set[str] = set()
        self._conns = 0
        self._pids = 100
        self._todo: list[i.Input] = []

    # --- moving on ----------------------------------------------------------------------------------------------------

    def begin(self) -> Stage:
        self._do(self.coordinator.start())
        self._drain()
        return self

    def running(self) -> Stage:
        """Up to the first attempt with all ranks running."""
        self.begin().until(State.RUNNING)
        return self

    def pass_(self, seconds: float) -> None:
        """Let time pass, in ticks."""
        for _ in range(round(seconds / STEP_S)):
            self.clock.pass_(STEP_S)
            self.tell(i.Tick())
            if round(self.clock.mono / STEP_S) % 5 == 0:
                for agent in list(self.agents.values()):
                    self._beat(agent)

    def until(self, state: State, within_s: float = 60.0) -> float:
        """Let time pass until the coordinator is in ``state``; how long that took."""
        began = self.clock.mono
        while self.coordinator.state is not state:
            assert self.clock.mono - began < within_s, (
                f"still {self.coordinator.state} after {within_s} s: {self.names_of_events()[-12:]}"
            )
            self.pass_(STEP_S)
        return round(self.clock.mono - began, 3)

    def tell(self, heard: i.Input) -> None:
        """One input, and all that follows from it at once."""
        self._todo.append(heard)
        self._drain()

    # --- the world ----------------------------------------------------------------------------------------------------

    def join(self, node: str, *, pid: int | None = None, ranks: tuple[int, ...] = (), attempt: int = 0, **hello: Any) -> Agent:
        """An agent dials; the same one again when it is there already and no pid is given."""
        agent = self.agents.get(node)
        if agent is None or not agent.alive or (pid is not None and pid != agent.pid):
            self._pids += 1
            agent = self.agents[node] = Agent(node, pid or self._pids, ranks=list(ranks), attempt=attempt)
        self._conns += 1
        agent.conn, agent.mute = self._conns, False
        values: dict[str, Any] = {
            "node": node, "pid": agent.pid, "boot_id": "b", "job_id": "7", "restart": self.spec.restart,
            "address": f"10.0.0.{node[1:]}", "warm": agent.warm, "cold_reason": "",
            "attempt": agent.attempt if agent.ranks else 0, "ranks": list(agent.ranks), **hello,
        }  # fmt: skip
        self.tell(i.Joined(agent.conn, m.Hello.build("secret", **values)))
        return agent

    def kill_rank(
        self,
        node: str,
        *,
        code: int = -9,
        signal: str = "SIGKILL",
        done: bool = False,
        tail: tuple[str, ...] = (),
        rank: int | None = None,
        step: int = 10,
    ) -> None:
        agent = self.agents[node]
        which = agent.ranks[0] if rank is None else rank
        agent.ranks.remove(which)
        self.say(agent, m.Exit(agent.attempt, which, code, signal, done, self.clock.wall, list(tail), step))

    def finish_ranks(self, *nodes: str, done: bool = True, fact: str | None = "finished", at: int = 10, **fields: Any) -> None:
        """All ranks of these nodes (all nodes when empty) reach their end."""
        for name in nodes or self.names:
            agent = self.agents.get(name)
            while agent is not None and agent.alive and agent.ranks:
                if fact is not None:
                    self.fact(name, agent.ranks[0], fact, step=10, **fields)
                self.kill_rank(name, code=0, signal="", done=done, step=at)

    def fact(self, node: str, rank: int, kind: str, **fields: Any) -> None:
        agent = self.agents[node]
        self.say(agent, m.Fact(agent.attempt or self.coordinator.number, rank, kind, fields, self.clock.wall))

    def everywhere(self, kind: str, **fields: Any) -> None:
        """Every rank says the same."""
        for agent in list(self.agents.values()):
            for rank in list(agent.ranks):
                self.fact(agent.node, rank, kind, **fields)

    def kill_agent(self, node: str) -> None:
        """The agent dies, its ranks with it, its connection ends, and what had started it ends too."""
        agent = self.agents[node]
        conn, agent.alive, agent.ranks, agent.conn = agent.conn, False, [], None
        if conn is not None:
            self.tell(i.Parted(conn, "closed"))
        self.tell(i.CarrierEnded(node, 137, "killed"))

    def power_off(self, node: str) -> None:
        """Silence, and nothing else."""
        self.agents[node].mute = True

    def say(self, agent: Agent, message: m.Message) -> None:
        if agent.conn is not None and not agent.mute and agent.alive:
            self.tell(i.Heard(agent.conn, message))

    def slurm_says(
        self,
        cause: Cause,
        *,
        requeued: bool = False,
        known: bool = True,
        left_s: float = 20.0,
        waited_s: float = 0.0,
        **record: str,
    ) -> None:
        """What Slurm answers from now on; ``record`` are fields of the job that differ from a running one."""
        self.verdict = lambda: dataclasses.replace(
            self._verdict(cause, requeued=requeued, known=known, left_s=left_s, **record), waited_s=waited_s
        )

    def _verdict(
        self, cause: Cause, *, requeued: bool = False, known: bool = True, left_s: float = 20.0, **record: str
    ) -> Verdict:
        limit = Deadline(self.clock.wall + left_s, self.clock.wall + left_s + 10, "")
        return Verdict(cause, requeued, limit, "as Slurm says", known, job_record(**record) if known else None)

    def warn(self, signal: str = "SIGTERM", node: str = "n2") -> None:
        """An agent hears a signal of Slurm's."""
        self.say(self.agents[node], m.Warned(signal, self.clock.wall))

    # --- looking ------------------------------------------------------------------------------------------------------

    def names_of_events(self) -> list[str]:
        return [event["event"] for event in self.events]

    def last(self, name: str) -> dict[str, Any]:
        """The newest event of that name; fails with the whole list when there is none."""
        found = [event for event in self.events if event["event"] == name]
        assert found, f"no {name} in {self.names_of_events()}"
        return found[-1]

    def count(self, name: str) -> int:
        return self.names_of_events().count(name)

    @property
    def live_ranks(self) -> dict[str, list[int]]:
        return {agent.node: agent.ranks for agent in self.agents.values() if agent.ranks}

    # --- the other side of every output -------------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._todo:
            while self._todo:
                self._do(self.coordinator.handle(self._todo.pop(0)))
            self._do(self.coordinator.handle(i.Tick()))

    def _do(self, outputs: list[i.Output]) -> None:
        for output in outputs:
            self.outputs.append(output)
            match output:
                case i.Send(conn, message):
                    self._deliver(conn, message)
                case i.Drop(conn):
                    self._dropped(conn, output.quit)
                case i.Record(event, fields, t, attempt):
                    self.events.append({"event": event, "t": t, "attempt": attempt, "restart": self.spec.restart, **fields})
                case i.WriteAttempt(number):
                    self.written.append(number)
                    if self.write_attempts:
                        self._todo.append(i.AttemptWritten(number))
                case i.WriteStatus(status):
                    self.statuses.append(status)
                case i.StartAgent(node):
                    self.started.append(node)
                    if self.auto_start and self.startable(node):
                        self._drain_after(lambda node=node: self.join(node, pid=self._new_pid()))
                case i.AskSlurm():
                    if self.slurm_answers:
                        self._todo.append(i.SlurmSaid(self.verdict()))
                case i.LookAtNodes():
                    if self.slurm_answers:
                        self._todo.append(i.NodesSeen(dict(self.drained), room=self.room, maintenance_at=self.maintenance_at))
                case i.Requeue():
                    self.requeues.append(output)
                    self._todo.append(i.RequeueEnded(self.requeue_ok, "as told"))
                case i.Finish(code):
                    self.exit_code = code

    def _drain_after(self, action: Callable[[], Any]) -> None:
        action()

    def _new_pid(self) -> int:
        self._pids += 1
        return self._pids

    def _agent_of(self, conn: int) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.conn == conn and agent.alive and not agent.mute), None)

    def _dropped(self, conn: int, quit_: bool) -> None:
        agent = self._agent_of(conn)
        if agent is not None:
            agent.conn = None
            if quit_:
                agent.alive, agent.ranks = False, []

    def _deliver(self, conn: int, message: m.Message) -> None:
        agent = self._agent_of(conn)
        if agent is None:
            return
        match message:
            case m.Hint():
                agent.hints.append(message)
            case m.Store(attempt):
                self._todo.append(i.Heard(conn, m.StoreReady(attempt, 29500)))
            case m.Launch():
                agent.attempt, agent.ranks = message.attempt, [rank for rank, _ in message.ranks]
                agent.launches.append(message)
                self._todo.append(i.Heard(conn, m.Launched(message.attempt, {}, True, "", 0.01)))
            case m.Kill(attempt):
                if not agent.stubborn:
                    for rank in agent.ranks:
                        exit_ = m.Exit(agent.attempt, rank, -9, "SIGKILL", False, self.clock.wall, [], 10)
                        self._todo.append(i.Heard(conn, exit_))
                    agent.ranks = []
                    self._todo.append(i.Heard(conn, m.Stopped(attempt, 1, 0.01, "kill")))
            case m.Order():
                agent.orders.append(message)
            case m.Quit() if agent.node not in self.deaf_to_quit:
                agent.alive, agent.ranks, agent.conn = False, [], None
                self._todo += [i.Parted(conn, "closed"), i.CarrierEnded(agent.node, 0, "")]

    def _beat(self, agent: Agent) -> None:
        agent.beats += 1
        ranks = {str(rank): agent.progress.get(rank, [10, 2, 0.1, False, 0.1]) for rank in agent.ranks}
        self.say(agent, m.Beat(agent.beats, agent.attempt if agent.ranks else 0, ranks))
