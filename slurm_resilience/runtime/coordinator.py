"""The supervisor's brain: a pure state machine from what is heard to what is to be done.  No I/O, no threads, no clock.

Inputs change what is known (the :mod:`scene`); then it is looked at, and the next of the :mod:`states` entered.  Rules of
every state: nothing is launched before every node is provably free of older attempts; the attempt number is durable before
anybody may use it; our own absence is never held against anybody; what ends the run is an event before it happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_resilience._clock import Clock
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause, ConfigError, ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.checks import Checks
from slurm_resilience.runtime.farewell import Farewell, Leaving
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.incident_record import record_of
from slurm_resilience.runtime.inheritance import Inheritance
from slurm_resilience.runtime.launching import launches, situation
from slurm_resilience.runtime.moving import Moving
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.placing import Placing
from slurm_resilience.runtime.policy import Decision, decide, decide_misfit, decide_warned
from slurm_resilience.runtime.rank_orders import RankOrders
from slurm_resilience.runtime.run_folder import RunStatus
from slurm_resilience.runtime.scene import Scene
from slurm_resilience.runtime.spec import RunSpec, Takeover
from slurm_resilience.runtime.states import After, State
from slurm_resilience.runtime.step_note import StepNote

_PREPARE_S = 60.0
_UNSTOPPABLE_S = 30.0
_MANY = 1000  # nodes


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
        takeover: Takeover | None = None,
    ) -> None:
        self.spec, self.config, self.history = spec, config, history
        self._out = Outbox(clock, history, restart=spec.restart, attempt=attempt)
        self.scene = Scene(self._out, spec, config, nodes, restarted=restarted, taken_over=takeover is not None)
        self.fleet, self.warnings = self.scene.fleet, self.scene.warnings
        self._placing = Placing(self._out, self.scene, spec, config)
        self._inheritance = Inheritance(self._out, self.scene, self._placing)
        self._moving = Moving(self._out, self.scene, spec, config, self._placing)
        self._orders = RankOrders(self._out, self.fleet)
        self.state = State.GATHERING
        self.farewell: Farewell | None = None
        self._restarted, self._takeover = restarted, takeover
        self._after = After.FAULT
        self._fault: tuple[Cause, str] | None = None
        self._told_to_wait = self._superseded = False
        self._gather_at = float("-inf")
        self._steps = StepNote(self._out)
        self._checks = Checks(self._out, self.scene, spec, config)
        self._since = self._idle_since = self._out.now
        self._on: dict[State, Callable[[], None]] = {
            State.GATHERING: self._on_gathering, State.ADOPTING: self._on_adopting, State.PREPARING: self._on_preparing,
            State.RUNNING: self._on_running, State.ENDING: self._on_ending, State.STOPPING: self._on_stopping,
            State.ASKING: self._on_asking, State.LEAVING: self._on_leaving, State.CHECKING: self._on_checking,
        }  # fmt: skip

    @property
    def number(self) -> int:
        """The number of the last attempt."""
        return self._out.attempt

    @property
    def ended(self) -> bool:
        return self.farewell is not None and self.farewell.state is Leaving.ENDED

    def start(self) -> list[i.Output]:
        """The first outputs: announce the allocation or the restart, and have the agents started."""
        self._out.put(i.WriteStatus(RunStatus("running")))
        if self._takeover is not None:
            if self._inheritance.take_over(self._takeover):
                self._incident()
        elif self._restarted:
            if self._inheritance.adopt():
                self._enter(State.ADOPTING)
            self._out.record("supervisor_restarted", nodes=list(self.fleet.nodes))
        else:
            if self.history.lost is not None:
                self._out.record("allocation_lost", **self.history.lost)
            self._out.record("allocation_started", nodes=list(self.fleet.nodes), job_id=self.spec.job_id)
        self.scene.start_agents()
        return self._out.take()

    def handle(self, heard: i.Input) -> list[i.Output]:
        """Take one input; return what is to be done now."""
        if self.ended or self._superseded:
            return []
        if isinstance(heard, i.Superseded):
            # The other one writes the events from now on: not a word more from us.
            self._superseded = True
            return [i.Finish(int(ExitCode.INTERNAL))]
        self._out.open()
        self.scene.hear(heard)
        if isinstance(heard, i.RequeueEnded) and self.farewell is not None:
            self.farewell.requeue_ended(heard)
        # Thousands of agents that come or go one by one are looked at together.
        if self.state not in (State.GATHERING, State.LEAVING) or isinstance(heard, i.Tick):
            self._advance()
        self._steps.keep(self.scene.attempt if self.state is State.RUNNING else None, committed=self.scene.committed)
        self.scene.committed = False
        return self._out.take()

    def _advance(self) -> None:
        """Move on as far as what is known allows."""
        before = None
        while before is not self.state:
            before = self.state
            self._on[self.state]()

    # --- states: move on when what is known allows --------------------------------------------------------------------

    def _on_gathering(self) -> None:
        if self._must_end():
            self._enter(State.ASKING)
            self.warnings.ask_afresh()
            return
        if self._out.now < self._gather_at:
            return
        self._gather_at = self._out.now + len(self.fleet.nodes) // _MANY / 20  # a look at thousands takes its time
        if self.scene.misfit:
            self._leave(_stop(self.scene.misfit, Cause.CONFIG_ERROR, ExitCode.CONFIG_ERROR))
            return
        now = situation(
            self.fleet, self.scene.drains, self.config, self.spec,
            now=self._out.now, idle_since=self._idle_since, fault=self._fault, before=self.scene.attempt,
            suspects=self.history.suspects,
        )  # fmt: skip
        decision = decide(self.history, now, self.config)
        if decision.action == "launch":
            if self._checks.begin(decision.nodes, fault=self._fault is not None):
                self._enter(State.CHECKING)
            else:
                self._prepare(decision)
        elif decision.action != "wait":
            self._leave(decision.because(self.fleet.failures()))
        elif self._fault is not None and not self._told_to_wait:
            self._told_to_wait = True
            self._out.record("decided", action="wait", reason=decision.reason)

    def _on_adopting(self) -> None:
        attempt = self._current()
        if attempt.all_rejoined and not attempt.incomplete:
            self._enter(State.RUNNING)
            self._out.record("attempt_adopted", nodes=list(attempt.nodes), world=attempt.world)
        elif attempt.incomplete or self._age() > self.config.limits.node_silence_s or self._must_end():
            self._stop_ranks(After.RESTART)

    def _on_checking(self) -> None:
        if self._checks.over(must_end=self._must_end()):
            self._after = After.CHECKED
            self._enter(State.STOPPING)
            self._orders.kill()

    def _on_preparing(self) -> None:
        attempt = self._current()
        if self._age() > _PREPARE_S:
            slow = "the attempt number is not written" if not attempt.written else "its store is not up"
            detail = f"{slow} after {_PREPARE_S:g} s"
            attempt.evidence.add(Cause.LAUNCH_FAILED, t=self._out.wall, node=attempt.nodes[0], detail=detail)
        if attempt.failed(self._out.now):
            self._incident()
        elif self._must_end():
            self._stop_ranks(After.WARNED)
        elif attempt.written and attempt.master_port is not None:
            self._launch()

    def _on_running(self) -> None:
        attempt = self._current()
        if attempt.failed(self._out.now):
            self._incident()
        elif attempt.is_over:
            asked = attempt.facts.said("stopped") and not attempt.facts.said("finished")
            self._stop_ranks(After.LEFT if asked else After.COMPLETE)
        elif self._must_end():
            self._end_ranks(After.WARNED)
        elif self._leaves_a_drained_node():
            return
        elif self.scene.committed:
            self._grow_when_possible()

    def _on_ending(self) -> None:
        attempt, wall = self._current(), self._out.wall
        if self._after.goes_on and self._must_end():
            self._after = After.WARNED
        failed = attempt.failed(self._out.now)
        if failed and self._after.goes_on:
            self._incident()
            return
        if failed:
            self.warnings.failed(attempt.failed_at(wall))
        until = self.warnings.until
        if until is None:
            until = wall + self.config.limits.stop_grace_s - self._age()
        # Who has saved for a new launch need not take its time to end: torch alone takes seconds for that.
        done = attempt.all_ended or (self._after.goes_on and attempt.facts.said_by_all("stopped"))
        if done or wall >= until:
            if not done:
                saved = attempt.facts.count("stopped")
                self._out.record("stop_deadline_passed", ended=len(attempt.exits), saved=saved, world=attempt.world)
            self._stop_ranks(self._after)
        else:
            self._order_stop()

    def _on_stopping(self) -> None:
        if self.fleet.clear(self._out.now):
            self._stopped()
        elif self._age() > _UNSTOPPABLE_S:
            for node in self.fleet.nodes.values():
                if node.connected and node.holds:
                    self.scene.lose(node, f"it could not stop its ranks in {_UNSTOPPABLE_S:g} s")
        else:
            self._orders.kill_again()

    def _on_asking(self) -> None:
        if self.warnings.alarm is None:
            self._gather(None)
            return
        verdict = self.warnings.verdict()
        if verdict is not None:
            can = self.config.requeue and self.spec.can_requeue
            how = {"already_requeued": verdict.requeued, "can_requeue": can, "by_script": self.spec.script_requeues}
            self._leave(decide_warned(verdict.cause, verdict.detail, **how, by_hand=verdict.by_hand,
                                      vain_limits=self.history.vain_limits))  # fmt: skip

    def _on_leaving(self) -> None:
        if self.farewell is not None:
            self.farewell.advance()

    # --- moves --------------------------------------------------------------------------------------------------------

    def _prepare(self, decision: Decision) -> None:
        order = {name: position for position, name in enumerate(self.fleet.nodes)}
        try:
            placement = self._placing.place(sorted(decision.nodes, key=order.__getitem__))
        except ConfigError as error:
            can = self.config.requeue and self.spec.can_requeue
            lost = bool(self.fleet.lost() or self.scene.drains.drained)
            self._leave(decide_misfit(str(error), self._fault[0] if self._fault else None, lost=lost, can_requeue=can))
            return
        self._out.attempt += 1
        self.scene.attempt = self._placing.attempt(placement)
        self.scene.attempt.preparing = True
        self.fleet.hold(placement.nodes, self.number)
        self._enter(State.PREPARING)
        self._out.record("decided", action="launch", reason=decision.reason)
        self._out.record("attempt_started", nodes=list(placement.nodes), world=placement.world, plan=placement.plan)
        self._out.put(i.WriteAttempt(self.number))
        self._out.send(self.fleet.nodes[placement.nodes[0]].conn, m.Store(self.number))

    def _launch(self) -> None:
        attempt = self._current()
        ended = f"; the one before ended by {self._fault[0]}: {self._fault[1]}" if self._fault else ""
        self._fault = None
        attempt.preparing = False
        self._enter(State.RUNNING)
        excused, warm = self.history.excused, self.config.warm
        for conn, launch in launches(attempt, self.fleet, self.spec, excused=excused, wait_warm=warm, ended=ended):
            self._out.send(conn, launch)

    def _incident(self) -> None:
        """Something ended that should not have."""
        origin = self.scene.own_up(attempt := self._current())
        assert origin is not None
        self._out.record("fault_detected", cause=str(origin.cause), node=origin.node or None, rank=origin.rank,
                         detail=origin.detail, since=round(origin.since, 3), step=attempt.step)  # fmt: skip
        if origin.node in self.fleet.nodes:
            self.scene.hints.blame(origin.node, self.fleet.nodes[origin.node].conn, origin.cause, origin.since)
        self._stop_ranks(After.FAULT, look="ranks" if origin.cause is Cause.HANG else "node")

    def _end_ranks(self, after: After) -> None:
        """Have the ranks save and end by themselves."""
        self._after = after
        self._orders.forget_stop()
        self._enter(State.ENDING)

    def _order_stop(self) -> None:
        """Tell the ranks to stop, and again when there is more or less time for it than they were told."""
        warned = self._after is After.WARNED
        cause = str(self.warnings.cause) if warned else self._after.value
        self._orders.stop(self._current(), deadline=self.warnings.until if warned else None, cause=cause)

    def _stop_ranks(self, after: After, *, look: str = "") -> None:
        self._after = after
        self._current().killing = True
        self._enter(State.STOPPING)
        self._orders.kill(look)

    def _stopped(self) -> None:
        """Nothing of the attempt is alive any more."""
        if self._after is After.CHECKED:
            self._checks.finish()
            self._enter(State.GATHERING)
            return
        attempt, after = self._current(), self._after
        attempt.name_culprit()
        origin, step = attempt.evidence.origin(), attempt.reached
        if after is After.COMPLETE:
            self._out.record("run_completed", step=step)
            self._leave(_stop("every rank has finished", Cause.UNKNOWN, ExitCode.OK))
            return
        where: dict[str, Any] = {"step": step}
        if origin is not None:
            where |= {"node": origin.node or None, "rank": origin.rank, "detail": origin.detail}
        if after is After.FAULT and origin is not None:
            self._fault = (origin.cause, f"{origin.node}: {origin.detail}" if origin.node else origin.detail)
            how: dict[str, Any] = {"signature": origin.signature or None, "signal": origin.signal or None}
            self._out.record("attempt_stopped", fault=True, cause=str(origin.cause), **how, **where)
            self._out.put(i.WriteIncident(self.number, record_of(attempt, origin, wall=self._out.wall)))
        else:
            why = self.warnings.why if after is After.WARNED else {"cause": after.value}
            self._out.record("attempt_stopped", fault=False, **why, saved=attempt.all_well, **where)
        if after is After.LEFT:
            words = attempt.facts.words("stopped").get("why") or "they did not say why"
            reason = f"the ranks ended by themselves before the end: {words}"
            self._leave(_stop(reason, Cause.CANCELLED, ExitCode.CANCELLED))
        else:
            self._gather(self._fault)

    def _gather(self, fault: tuple[Cause, str] | None) -> None:
        self._fault, self._told_to_wait, self._idle_since = fault, False, self._out.now
        self._gather_at = float("-inf")
        self._enter(State.GATHERING)

    def _grow_when_possible(self) -> None:
        """A checkpoint has just been committed: the cheapest moment to take nodes in that are there again."""
        if self._moving.grows(self._current()):
            self._end_ranks(After.GROW)

    def _leaves_a_drained_node(self) -> bool:
        """Somebody drained a node under the attempt: save, and go on without it where there is somewhere to go."""
        move = self._moving.away(self._current())
        if isinstance(move, str):
            self._save("node_drained")
        elif move is not None:
            self._fault = (Cause.NODE_DRAINED, move.reason)
            self._end_ranks(After.MOVE)
            return True
        return False

    def _leave(self, decision: Decision) -> None:
        step = self.scene.attempt.reached if self.scene.attempt is not None else None
        if not step and self.history.best_step >= 0:  # this attempt did not even resume, but the run had come further
            step = self.history.best_step
        self._enter(State.LEAVING)
        self.farewell = Farewell(self._out, self.fleet, self.spec, decision, step=step)

    # --- small things -------------------------------------------------------------------------------------------------

    def _must_end(self) -> bool:
        """Everything has to end.  A mere wish for a checkpoint is granted here and forgotten."""
        if self.warnings.wants_checkpoint():
            self._save("asked")
        return self.warnings.must_end

    def _save(self, cause: str) -> None:
        """Have the ranks save and go on."""
        self._orders.save(self._current() if self.state is State.RUNNING else None, cause=cause)

    def _current(self) -> Attempt:
        assert self.scene.attempt is not None
        return self.scene.attempt

    def _age(self) -> float:
        """Seconds in this state."""
        return self._out.now - self._since

    def _enter(self, state: State) -> None:
        self.state, self._since = state, self._out.now
        self.scene.launching = state in (State.PREPARING, State.RUNNING, State.ENDING)
        self.scene.judging = state is State.RUNNING
        self.scene.adopting = state is State.ADOPTING
        self.scene.leaving = state is State.LEAVING


def _stop(reason: str, cause: Cause, code: ExitCode) -> Decision:
    return Decision("stop", reason, (), cause, code)
