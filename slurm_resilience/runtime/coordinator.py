"""The supervisor's brain: a pure state machine from what is heard to what is to be done.  No I/O, no threads, no clock.

    gathering → preparing → running ─┬─────────→ stopping ─┬→ gathering …               (a fault, a wish to grow)
                                     └→ ending ─────┘      └→ asking → closing → requeueing → ended

Inputs change what is known; then :meth:`_advance` looks at what is known and moves on.  Rules of every state: nothing is
launched before every node is provably free of older attempts; the attempt number is durable before anybody may use
it; our own absence is never held against anybody; what ends the run is an event before it happens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_resilience._clock import Clock
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause, ConfigError, ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.alarm import ASK_EVERY_S, Alarm, local_verdict
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.facts import quote
from slurm_resilience.runtime.fleet import Fleet, Node
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.planner import Placement, place
from slurm_resilience.runtime.policy import Decision, Situation, decide, decide_warned
from slurm_resilience.runtime.run_folder import RunState, RunStatus
from slurm_resilience.slurm.cause import Verdict
from slurm_resilience.slurm.states import JobState

# The loop ticks ten times a second; a longer gap than this means that we were stopped, swapped out or suspended.
FROZEN_S = 1.0
_AFTER_FREEZE_S = 3.0
_REDIAL_S = 2.5
_PREPARE_S = 60.0
_REKILL_S = 2.0
_UNSTOPPABLE_S = 30.0
_CLOSE_S = 6.0
_WATCH_EVERY_S = 30.0
_LAST_CALL_S = 5.0
# From the last save to the last process: agents end, the recipe is run.
_MARGIN_S = 4.0
_MOST_LOSSES_TO_GROW = 3


class State(str, enum.Enum):
    """What the coordinator is doing."""

    GATHERING = "gathering"
    ADOPTING = "adopting"
    PREPARING = "preparing"
    RUNNING = "running"
    ENDING = "ending"
    STOPPING = "stopping"
    ASKING = "asking"
    CLOSING = "closing"
    REQUEUEING = "requeueing"
    ENDED = "ended"


_WITH_RANKS = frozenset({State.ADOPTING, State.PREPARING, State.RUNNING, State.ENDING, State.STOPPING})
_LEAVING = frozenset({State.CLOSING, State.REQUEUEING, State.ENDED})


class After(str, enum.Enum):
    """Why ranks are stopped, which decides what follows."""

    FAULT = "fault"
    COMPLETE = "complete"
    WARNED = "warned"
    GROW = "grow"
    LEFT = "left"
    RESTART = "restart"


@dataclass(frozen=True)
class RunSpec:
    """What is run, and where it stands in Slurm; fixed for the life of a supervisor.

    ``requeue_nodes``: fewest and most nodes to ask for in the next allocation, None for what the job asked for.
    """

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, Any]
    checkpoints: str
    settings: dict[str, Any]
    job_id: str
    restart: int
    has_slurm: bool
    can_requeue: bool
    requeue_nodes: tuple[int, int] | None = None
    kill_wait_s: float = 30.0


class Coordinator:
    """Feed it inputs with :meth:`handle`; do what it returns, in that order."""

    def __init__(
        self,
        spec: RunSpec,
        config: ResilienceConfig,
        nodes: tuple[str, ...],
        *,
        clock: Clock,
        history: History,
        attempt: int,
        restarted: bool = False,
    ) -> None:
        self.spec, self.config, self.history, self.number = spec, config, history, attempt
        self.state, self.attempt, self.alarm = State.GATHERING, None, None  # type: State, Attempt | None, Alarm | None
        self._clock, self._now, self._wall = clock, clock.monotonic(), clock.time()
        limits = config.limits
        self.fleet = Fleet(nodes, now=self._now, lease_s=limits.node_silence_s, handshake_s=limits.handshake_s, held=attempt)
        self._restarted = restarted
        self._start_after = self._now + (_REDIAL_S if restarted else 0.0)
        self._after = After.FAULT
        self._fault: tuple[Cause, str] | None = None
        self._decision = Decision("wait", "")
        self._waiting = False
        self._saves = 0
        self._asked_at: float | None = None
        self._since = self._killed_at = self._watched_at = self._last_tick = self._idle_since = self._now
        self._freeze = (float("-inf"), 0.0)
        self._out: list[i.Output] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            i.Tick: self._tick, i.Joined: self._joined, i.Heard: self._heard, i.Parted: self._parted,
            i.CarrierEnded: self._carrier_ended, i.AttemptWritten: self._attempt_written, i.SlurmSaid: self._slurm_said,
            i.Signalled: self._signalled, i.RequeueEnded: self._requeue_ended, i.Superseded: self._superseded,
        }  # fmt: skip
        self._on: dict[State, Callable[[], None]] = {
            State.GATHERING: self._on_gathering, State.ADOPTING: self._on_adopting, State.PREPARING: self._on_preparing,
            State.RUNNING: self._on_running, State.ENDING: self._on_ending, State.STOPPING: self._on_stopping,
            State.ASKING: self._on_asking, State.CLOSING: self._on_closing,
        }  # fmt: skip

    def start(self) -> list[i.Output]:
        """The first outputs: announce the allocation or the restart, and have the agents started."""
        self._out = [i.WriteStatus(RunStatus("running"))]
        if self._restarted:
            self._adopt()
            self._record("supervisor_restarted", nodes=list(self.fleet.nodes))
        else:
            self._record("allocation_started", nodes=list(self.fleet.nodes), job_id=self.spec.job_id)
        self._start_agents()
        return self._out

    def handle(self, heard: i.Input) -> list[i.Output]:
        """Take one input; return what is to be done now."""
        self._out = []
        self._now, self._wall = self._clock.monotonic(), self._clock.time()
        if self.state is not State.ENDED:
            self._handlers[type(heard)](heard)
            self._advance()
        return self._out

    def _advance(self) -> None:
        """Move on as far as what is known allows."""
        before = None
        while before is not self.state and self.state in self._on:
            before = self.state
            self._on[self.state]()

    # --- inputs: what is known changes --------------------------------------------------------------------------------

    def _tick(self, _: i.Tick) -> None:
        gap, self._last_tick = self._now - self._last_tick, self._now
        if gap > FROZEN_S:
            self._freeze = (self._now, gap)
            self.fleet.forget_silence(self._now)
            self._record("supervisor_was_frozen", seconds=round(gap, 2))
        for node, why, silent in self.fleet.overdue(self._now):
            self._lose(node, why, silent=silent)
        if self.attempt is not None and self.state is State.RUNNING:
            self.attempt.judge(self.config.limits, now=self._now, wall=self._wall)
        if self.state not in _LEAVING:
            self._start_agents()
            if self._now - self._watched_at >= _WATCH_EVERY_S:
                self._ask()

    def _joined(self, it: i.Joined) -> None:
        hello, node = it.hello, self.fleet.nodes.get(it.hello.node)
        if node is None:
            self._out.append(i.Drop(it.conn, f"{hello.node} is not a node of this allocation", quit=True))
            return
        if (hello.job_id, hello.restart) != (self.spec.job_id, self.spec.restart):
            theirs, ours = f"{hello.job_id}.{hello.restart}", f"{self.spec.job_id}.{self.spec.restart}"
            self._out.append(i.Drop(it.conn, f"an agent of allocation {theirs}; this is {ours}", quit=True))
            return
        again = node.joined and (node.pid, node.boot_id) == (hello.pid, hello.boot_id)
        if node.joined and not again and node.lost_at is None:
            if node.conn is not None:
                self._out.append(i.Drop(node.conn, "another agent of this node took its place", quit=True))
                node.conn = None
            self._lose(node, "another agent took its place")
        replaced = self.fleet.join(it.conn, hello, self._now)
        if replaced is not None:
            self._out.append(i.Drop(replaced, "the same agent dialled again"))
        self._record("agent_joined", node=node.name, pid=hello.pid, boot_id=hello.boot_id, warm=hello.warm,
                     again=again or None, reason=hello.cold_reason or None)  # fmt: skip
        current = self.attempt if self.state in _WITH_RANKS and self.state is not State.STOPPING else None
        if self.state in _LEAVING:
            self._out.append(i.Send(it.conn, m.Quit("the run is ending")))
        elif current is not None and node.name in current.nodes and (again or self.state is State.ADOPTING):
            node.holds[self.number] = None
            current.came_back(node.name, set(hello.ranks) if hello.attempt == self.number else set(), self._now)
        elif hello.ranks:
            self._out.append(i.Send(it.conn, m.Kill(max(hello.attempt, self.number))))

    def _heard(self, it: i.Heard) -> None:
        node, message = self.fleet.of_conn(it.conn), it.message
        if node is None:
            return
        node.heard = self._now
        if self.attempt is not None and getattr(message, "attempt", None) == self.number:
            for event, fields, t in self.attempt.hear(node.name, message, now=self._now, wall=self._wall):
                self._note(event, fields, t, self.number)
        elif isinstance(message, m.Fact):
            event, fields, t = quote(node.name, message)
            self._note(event, fields, t, message.attempt)
        if isinstance(message, m.Stopped):
            self.fleet.release(node, message.attempt)
        elif isinstance(message, m.Warm):
            reason = message.reason if message.usable else ""
            self.fleet.warmed(node, self._now, warm=message.usable and message.warm, cold_reason=reason)
            self._record("agent_warm", node=node.name, warm=node.warm, reason=message.reason or None, took_s=message.seconds)
        elif isinstance(message, m.Warned):
            self._alarmed(message.signal, message.t, node.name)
        elif isinstance(message, m.Refused):
            self._record("agent_refused", node=node.name, what=message.what, why=message.why)
        elif isinstance(message, m.Fact) and message.fact == "checkpoint_committed":
            self._grow_when_possible()

    def _parted(self, it: i.Parted) -> None:
        node = self.fleet.of_conn(it.conn)
        if node is not None:
            self.fleet.part(node, self._now, expected=self.state in _LEAVING)

    def _lose(self, node: Node, why: str, *, silent: bool = False) -> None:
        since = self._wall - (self._now - node.heard)
        if node.conn is not None:
            self._out.append(i.Drop(node.conn, why))
        self.fleet.lose(node, self._now, since_wall=since, silent=silent)
        self._record("agent_lost", node=node.name, why=why, since=round(since, 3))
        if self.attempt is not None and self.state in _WITH_RANKS:
            self.attempt.lost(node.name, since=since, why=why)

    def _carrier_ended(self, it: i.CarrierEnded) -> None:
        node = self.fleet.nodes[it.node]
        before = node.failed_starts
        self.fleet.carrier_ended(node, it.tail or f"it ended with code {it.code}")
        if node.failed_starts == before or self.state in _LEAVING:
            return
        self._record("agent_start_failed", node=node.name, exit_code=it.code, detail=node.failure, times=node.failed_starts)
        if it.code == ExitCode.CONFIG_ERROR and self.state is State.GATHERING:
            self._close(
                _stop(f"the agent of {node.name} could not work: {node.failure}", Cause.CONFIG_ERROR, ExitCode.CONFIG_ERROR)
            )

    def _attempt_written(self, it: i.AttemptWritten) -> None:
        if self.attempt is not None and it.number == self.attempt.number:
            self.attempt.written = True

    def _signalled(self, it: i.Signalled) -> None:
        self._alarmed(it.signal, it.t, "supervisor")

    def _alarmed(self, signal: str, t: float, source: str) -> None:
        if self.state in _LEAVING:
            return
        if self.alarm is None:
            grace = self.config.limits.stop_grace_s
            if self.spec.has_slurm:
                grace = max(1.0, min(grace, self.spec.kill_wait_s - _MARGIN_S))
            self.alarm = Alarm(signal, heard_at=t, now=self._now, until=t + grace)
            fields = {"signal": signal, "source": source, "deadline": round(t + grace, 3)}
            self._note("warning_received", fields, t, self.number)
            self._ask()
        elif self.alarm.again(signal, self._now):
            self._note("warning_received", {"signal": signal, "source": source, "again": True}, t, self.number)
            if self.state is State.ENDING and self.alarm.urgent:
                self._order_stop(min(self.alarm.until, self._wall + _LAST_CALL_S))

    def _ask(self) -> None:
        """Have Slurm asked, unless a question is still open."""
        heard_at = self.alarm.heard_at if self.alarm is not None else self._wall
        self._watched_at = self._now
        if self.alarm is not None:
            self.alarm.asked_at = self._now
        if self.spec.has_slurm and self._asked_at is None:
            self._asked_at = self._now
            self._out.append(i.AskSlurm(heard_at))
        elif self.alarm is not None and not self.spec.has_slurm:
            self._explained(local_verdict(self.alarm.signal, heard_at=heard_at, grace_s=self.config.limits.stop_grace_s))

    def _slurm_said(self, it: i.SlurmSaid) -> None:
        asked_at, self._asked_at = self._asked_at, None
        record = it.verdict.record
        if record is not None:
            here = record.restarts == self.spec.restart
            if here and record.state is JobState.RUNNING and record.nodes:
                for name in self.fleet.remove_all_but(record.nodes):
                    self._record("node_gone", node=name, why="Slurm took it out of the job")
            over = not here or record.state is JobState.COMPLETING or record.state.ended or record.state.waiting
            if over and self.alarm is None:
                self._alarmed("none", self._wall, "slurm")
        if self.alarm is not None and asked_at is not None and asked_at >= self.alarm.since:
            self._explained(it.verdict)
            if self.state is State.ASKING and asked_at < self._since:
                self._ask()  # what was true before everything had stopped is not what we must act on

    def _explained(self, verdict: Verdict) -> None:
        assert self.alarm is not None
        if self.alarm.explain(verdict, self._now):
            said = self.alarm.verdict or verdict
            self._record("warning_explained", cause=str(said.cause), detail=said.detail, requeued=said.requeued or None,
                         deadline=round(said.deadline.soft_at, 3))  # fmt: skip
            if said.known and self.alarm.must_end:
                most = self.alarm.heard_at + self.config.limits.stop_grace_s
                self.alarm.until = min(said.deadline.soft_at - _MARGIN_S / 2, most)
                if self.state is State.ENDING:
                    self._order_stop(self.alarm.until)

    def _requeue_ended(self, it: i.RequeueEnded) -> None:
        self._record("requeue_done" if it.ok else "requeue_failed", **it.fields)
        if it.ok:
            self._end("requeued", self._decision, ExitCode.REQUEUED)
        else:
            self._decision = _stop(f"{self._decision.reason}; but {it.reason}", self._decision.cause, self._decision.exit_code)
            self._finish()

    def _superseded(self, it: i.Superseded) -> None:
        # The other one writes the events from now on: not a word more from us.
        self._out.append(i.Finish(int(ExitCode.INTERNAL)))
        self._enter(State.ENDED)

    # --- states: move on when what is known allows --------------------------------------------------------------------

    def _on_gathering(self) -> None:
        if self._warned():
            self._enter(State.ASKING)
            self._ask()
            return
        warm = self.config.warm
        ready = self.fleet.ready(self._now, need_warm=warm)
        before = self.attempt.nodes if self.attempt is not None else ()
        cause, detail = self._fault or (None, "")
        situation = Situation(
            fault=cause,
            detail=detail,
            ready=tuple(sorted(ready, key=lambda name: name not in before)),
            coming=self.fleet.coming(self._now, need_warm=warm),
            returning=self.fleet.returning(),
            lost=self.fleet.lost(),
            idle_s=self._now - self._idle_since,
            can_requeue=self.config.requeue and self.spec.can_requeue,
        )
        decision = decide(self.history, situation, self.config)
        if decision.action == "launch":
            self._prepare(decision)
        elif decision.action != "wait":
            why = "; ".join(f"{node.name}: {node.failure}" for node in self.fleet.nodes.values() if node.failure)
            self._close(decision.because(why))
        elif self._fault is not None and not self._waiting:
            self._waiting = True
            self._record("decided", action="wait", reason=decision.reason)

    def _on_adopting(self) -> None:
        assert self.attempt is not None
        if self.attempt.rejoined == set(self.attempt.nodes) and not self.attempt.incomplete:
            self._enter(State.RUNNING)
            self._record("attempt_adopted", nodes=list(self.attempt.nodes), world=self.attempt.world)
        elif self.attempt.incomplete or self._now - self._since > self.config.limits.node_silence_s or self._warned():
            self._stop_ranks(After.RESTART)

    def _on_preparing(self) -> None:
        assert self.attempt is not None
        if self.attempt.failed(self._now):
            self._incident()
        elif self._warned():
            self._stop_ranks(After.WARNED)
        elif self.attempt.written and self.attempt.master_port is not None:
            self._launch()
        elif self._now - self._since > _PREPARE_S:
            slow = "the attempt number is not yet written" if not self.attempt.written else "its store is not up"
            detail = f"{slow} after {_PREPARE_S:g} s"
            self.attempt.evidence.add(Cause.LAUNCH_FAILED, t=self._wall, node=self.attempt.nodes[0], detail=detail)
            self._incident()

    def _on_running(self) -> None:
        assert self.attempt is not None
        if self.attempt.failed(self._now):
            self._incident()
        elif self.attempt.all_ended:
            asked = self.attempt.facts.said("stopped") and not self.attempt.facts.said("finished")
            self._stop_ranks(After.LEFT if asked else After.COMPLETE)
        elif self._warned():
            assert self.alarm is not None
            self._after = After.WARNED
            self._enter(State.ENDING)
            self._order_stop(self.alarm.until)

    def _on_ending(self) -> None:
        assert self.attempt is not None
        if self._after is After.GROW and self._warned():
            assert self.alarm is not None
            self._after = After.WARNED
            self._order_stop(self.alarm.until)
        failed = self.attempt.failed(self._now)
        if failed and self._after is After.GROW:
            self._incident()
            return
        until = (
            self.alarm.until
            if self.alarm is not None
            else self._wall + self.config.limits.stop_grace_s - (self._now - self._since)
        )
        if failed:  # its peers may wait for it in a collective: they get a last moment, not the whole grace
            until = min(until, self.attempt.failed_at(self._wall) + _LAST_CALL_S)
        if self.attempt.all_ended or self._wall >= until:
            if not self.attempt.all_ended:
                self._record("stop_deadline_passed", ended=len(self.attempt.exits), world=self.attempt.world)
            self._stop_ranks(self._after)

    def _on_stopping(self) -> None:
        if self.fleet.clear(self.number, self._now):
            self._stopped()
        elif self._now - self._since > _UNSTOPPABLE_S:
            for node in self.fleet.nodes.values():
                if node.connected and node.holds:
                    self._lose(node, f"it could not stop its ranks in {_UNSTOPPABLE_S:g} s")
        elif self._now - self._killed_at > _REKILL_S:
            self._kill()

    def _on_asking(self) -> None:
        if self.alarm is None:
            self._gather(None)
        elif self.alarm.asked_at < self._since or self._asked_at is not None:
            return
        elif self.alarm.conclusive(self._now, patience_s=self.spec.kill_wait_s / 2):
            verdict = self.alarm.verdict
            assert verdict is not None
            can = self.config.requeue and self.spec.can_requeue
            self._close(decide_warned(verdict.cause, verdict.detail, already_requeued=verdict.requeued, can_requeue=can))
        elif self._now - self.alarm.asked_at > ASK_EVERY_S:
            self._ask()

    def _on_closing(self) -> None:
        left = [node.name for node in self.fleet.nodes.values() if node.connected or (node.carrier and node.lost_at is None)]
        if left and self._now - self._since <= _CLOSE_S:
            return
        if left:
            self._record("agents_left_behind", nodes=left)
        if self._decision.action != "requeue":
            self._finish()
            return
        lost = {node.name: node.lost_wall for node in self.fleet.nodes.values() if node.lost_at is not None and not node.gone}
        nodes = self.spec.requeue_nodes
        self._record("requeue_started", nodes=list(nodes) if nodes else None, lost=sorted(lost) or None)
        self._enter(State.REQUEUEING)
        self._out.append(i.Requeue(nodes, lost))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _prepare(self, decision: Decision) -> None:
        order = list(self.fleet.nodes)
        try:
            placement = place(sorted(decision.nodes, key=order.index), self.config)
        except ConfigError as error:
            self._close(_stop(str(error), Cause.CONFIG_ERROR, ExitCode.CONFIG_ERROR))
            return
        self.number += 1
        self.attempt = Attempt(self.number, placement, now=self._now)
        self.fleet.hold(placement.nodes, self.number)
        self._enter(State.PREPARING)
        self._record("decided", action="launch", reason=decision.reason)
        self._record("attempt_started", nodes=list(placement.nodes), world=placement.world, plan=placement.plan)
        self._out.append(i.WriteAttempt(self.number))
        self._send(placement.nodes[0], m.Store(self.number))

    def _launch(self) -> None:
        assert self.attempt is not None
        placement, port = self.attempt.placement, self.attempt.master_port or 0
        first = self.fleet.nodes[placement.nodes[0]]
        ended = f"; the one before ended by {self._fault[0]}: {self._fault[1]}" if self._fault else ""
        self._fault = None
        self._enter(State.RUNNING)
        for group, (name, ranks) in enumerate(zip(placement.nodes, placement.ranks, strict=True)):
            launch = m.Launch(
                attempt=self.number, world=placement.world, ranks=[[rank, local] for local, rank in enumerate(ranks)],
                group_rank=group, groups=len(placement.nodes), master_addr=first.address, master_port=port,
                store_hosted=port > 0, argv=list(self.spec.argv), cwd=self.spec.cwd, env=self.spec.env,
                checkpoints=self.spec.checkpoints, settings=self.spec.settings, plan=placement.plan,
                header=f"=== attempt {self.number} on {name}{ended} ===", wait_warm=self.config.warm,
            )  # fmt: skip
            self._send(name, launch)

    def _incident(self) -> None:
        """Something ended that should not have."""
        assert self.attempt is not None
        woke_at, frozen_s = self._freeze
        if self._now - woke_at < _AFTER_FREEZE_S and frozen_s > self.config.limits.agent_silence_s:
            detail = f"the supervisor itself was frozen for {frozen_s:.1f} s, so the agents stopped their ranks"
            self.attempt.evidence.add(Cause.UNKNOWN, t=self._wall - (self._now - woke_at) - frozen_s, node="", detail=detail)
        origin = self.attempt.evidence.origin()
        assert origin is not None
        self._record("fault_detected", cause=str(origin.cause), node=origin.node or None, rank=origin.rank,
                     detail=origin.detail, since=round(origin.since, 3), step=self.attempt.step)  # fmt: skip
        self._stop_ranks(After.FAULT)

    def _order_stop(self, until: float | None) -> None:
        assert self.attempt is not None
        cause = "grow" if self.alarm is None else str(self.alarm.cause)
        if self.alarm is not None and until is not None:
            self.alarm.until = until
        self._order(m.Order(self.number, stop=True, save=self._saves, deadline=until, cause=cause))

    def _order(self, order: m.Order) -> None:
        for name in self.attempt.nodes if self.attempt is not None else ():
            self._send(name, order)

    def _stop_ranks(self, after: After) -> None:
        self._after = after
        if self.attempt is not None:
            self.attempt.killing = True
        self._enter(State.STOPPING)
        self._kill()

    def _kill(self) -> None:
        self._killed_at = self._now
        for node in self.fleet.nodes.values():
            if node.conn is not None and node.holds:
                self._out.append(i.Send(node.conn, m.Kill(self.number)))

    def _stopped(self) -> None:
        attempt, after = self.attempt, self._after
        origin = attempt.evidence.origin() if attempt is not None else None
        step = attempt.step if attempt is not None and attempt.step >= 0 else None
        if after is After.COMPLETE:
            self._record("run_completed", step=step)
            self._close(_stop("every rank has finished", Cause.UNKNOWN, ExitCode.OK))
            return
        where = {"node": origin.node or None, "rank": origin.rank, "detail": origin.detail} if origin is not None else {}
        if after is After.FAULT and origin is not None:
            self._fault = (origin.cause, f"{origin.node}: {origin.detail}" if origin.node else origin.detail)
            self._record(
                "attempt_stopped", fault=True, cause=str(origin.cause), signature=origin.signature or None, step=step, **where
            )
        else:
            why = str(self.alarm.cause) if self.alarm is not None and after is After.WARNED else after.value
            saved = attempt is not None and attempt.all_well
            self._record("attempt_stopped", fault=False, cause=why, saved=saved, step=step, **where)
        if after is After.LEFT:
            words = attempt.facts.words("stopped").get("why") if attempt is not None else None
            reason = f"the ranks ended by themselves before the end: {words or 'they did not say why'}"
            self._close(_stop(reason, Cause.CANCELLED, ExitCode.CANCELLED))
        else:
            self._gather(self._fault)

    def _gather(self, fault: tuple[Cause, str] | None) -> None:
        self._fault, self._waiting, self._idle_since = fault, False, self._now
        self._enter(State.GATHERING)

    def _grow_when_possible(self) -> None:
        if self.state is not State.RUNNING or self.attempt is None or len(self.attempt.nodes) >= self.config.nodes[1]:
            return
        extra = [
            name
            for name in self.fleet.ready(self._now, need_warm=self.config.warm)
            if name not in self.attempt.nodes and self.fleet.nodes[name].losses <= _MOST_LOSSES_TO_GROW
        ]
        if extra:
            reason = f"{', '.join(extra)} can be used again, and a checkpoint has just been committed"
            self._record("decided", action="grow", reason=reason)
            self._after = After.GROW
            self._enter(State.ENDING)
            self._order_stop(None)

    def _adopt(self) -> None:
        """What a dead supervisor had running may still run: its agents decide that when they dial again."""
        started = self.history.open_attempt
        if started and int(started["attempt"]) == self.number and set(started["nodes"]) <= set(self.fleet.nodes):
            self.attempt = Attempt(self.number, Placement.of_plan(dict(started["plan"])), now=self._now)
            self._enter(State.ADOPTING)

    def _close(self, decision: Decision) -> None:
        self._decision = decision
        if decision.exit_code != ExitCode.OK:
            self._record("decided", action=decision.action, reason=decision.reason, cause=str(decision.cause))
        self._enter(State.CLOSING)
        for node in self.fleet.nodes.values():
            if node.conn is not None:
                self._out.append(i.Send(node.conn, m.Quit(decision.reason[:200])))

    def _finish(self) -> None:
        decision = self._decision
        if decision.exit_code == ExitCode.OK:
            self._end("complete", decision, ExitCode.OK)
            return
        self._record("run_failed", cause=str(decision.cause), reason=decision.reason, exit_code=int(decision.exit_code))
        self._end("cancelled" if decision.cause is Cause.CANCELLED else "failed", decision, decision.exit_code)

    def _end(self, state: RunState, decision: Decision, code: ExitCode) -> None:
        step = self.attempt.step if self.attempt is not None and self.attempt.step >= 0 else None
        cause = "" if code == ExitCode.OK else str(decision.cause)
        self._out.append(i.WriteStatus(RunStatus(state, cause, decision.reason, int(code), step)))
        self._out.append(i.Finish(int(code)))
        self._enter(State.ENDED)

    # --- small things -------------------------------------------------------------------------------------------------

    def _warned(self) -> bool:
        """Everything has to end.  A mere wish for a checkpoint is granted here and forgotten."""
        if self.alarm is None:
            return False
        if self.alarm.save_only(self._now):
            self.alarm = None
            self._saves += 1
            if self.state is State.RUNNING:
                self._order(m.Order(self.number, stop=False, save=self._saves, deadline=None, cause="asked"))
            return False
        if not self.alarm.must_end and self._now - self.alarm.asked_at > ASK_EVERY_S:
            self._ask()
        return self.alarm.must_end

    def _start_agents(self) -> None:
        if self._now >= self._start_after:
            for node in self.fleet.to_start(self._now):
                self.fleet.starting(node, self._now)
                self._out.append(i.StartAgent(node.name))

    def _enter(self, state: State) -> None:
        self.state, self._since = state, self._now

    def _record(self, event: str, **fields: Any) -> None:
        self._note(event, fields, None, self.number)

    def _note(self, event: str, fields: dict[str, Any], t: float | None, number: int) -> None:
        known = {key: value for key, value in fields.items() if value is not None}
        self.history.apply({"event": event, "attempt": number, "restart": self.spec.restart, **known})
        self._out.append(i.Record(event, known, self._wall if t is None else t, number))

    def _send(self, name: str, message: m.Message) -> None:
        conn = self.fleet.nodes[name].conn
        if conn is not None:
            self._out.append(i.Send(conn, message))


def _stop(reason: str, cause: Cause, code: ExitCode) -> Decision:
    return Decision("stop", reason, (), cause, code)
