"""What is known now: every input changes it, none decides anything.

The coordinator looks at it and moves on; it tells the scene which attempt there is and what it is doing with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.checking import Checking
from slurm_resilience.runtime.drain_watch import DrainWatch
from slurm_resilience.runtime.evidence import Origin
from slurm_resilience.runtime.facts import quote
from slurm_resilience.runtime.fleet import REPLACE_S, Fleet, Node
from slurm_resilience.runtime.hint_desk import HintDesk
from slurm_resilience.runtime.live import LiveView
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.spec import RunSpec
from slurm_resilience.runtime.warning_desk import WarningDesk

# The loop ticks ten times a second; a longer gap than this means that we were stopped, swapped out or suspended.  A turn that
# hears thousands of agents takes its time where the processor is shared, and is no absence.
_FROZEN_S = (1.0, 2.0)
_NODES_PER_FROZEN_S = 1500
_AFTER_FREEZE_S = 3.0
_REDIAL_S = 2.5
# Agents whose supervisor is gone with its machine wait in vain for its answer before they look for another.
_FIND_S = 8.0
# From its silence until a supervisor that was cut off has surely stopped its ranks: its own patience, and the stop.
_STOPPED_S = 1.5
# With thousands of agents the loop turns thousands of times a second; silence is measured in seconds.
_LOOK_EVERY_S = 0.05
# Hangs are judged by what beats say, which come twice a second; with thousands of ranks a look at all of them takes its time.
_JUDGE_EVERY_S, _RANKS_PER_S = 0.1, 10_000


class Scene:
    """Nodes, attempt, warnings.

    Set by the coordinator: ``launching``, ranks of the attempt are meant to be alive; ``judging``, and to show progress;
    ``adopting``, they are those of a dead supervisor; ``leaving``, nothing new begins; ``check``, the last one of
    the nodes.  Set here: ``committed``, by the input just taken; ``misfit``, why an agent cannot work here at all.
    """

    def __init__(
        self, out: Outbox, spec: RunSpec, config: ResilienceConfig, nodes: tuple[str, ...], *, restarted: bool,
        taken_over: bool = False,
    ) -> None:  # fmt: skip
        limits = config.limits
        self.fleet = Fleet(nodes, now=out.now, lease_s=limits.node_silence_s, handshake_s=limits.handshake_s, held=out.attempt)
        self.hints = HintDesk(out)
        self._live = LiveView(out)
        self.drains = DrainWatch(out, policy=config.on_drain, asks=spec.has_slurm)
        self.warnings = WarningDesk(out, spec, grace_s=limits.stop_grace_s)
        self._leaves_for_maintenance = self.drains.moves and config.requeue and spec.can_requeue
        self.attempt: Attempt | None = None
        self.check: Checking | None = None
        self.launching = self.judging = self.adopting = self.leaving = self.committed = False
        self.misfit = ""
        self._woke_at, self._frozen_s = float("-inf"), 0.0
        self._out, self._spec, self._limits = out, spec, limits
        self._last_tick = self._looked_at = self._judged_at = out.now
        self._frozen_after_s = min(_FROZEN_S[1], max(_FROZEN_S[0], len(nodes) / _NODES_PER_FROZEN_S))
        self._look_every_s = max(_LOOK_EVERY_S, len(nodes) / 50_000)
        self._start_after = out.now + (_FIND_S if taken_over else _REDIAL_S if restarted else 0.0)
        self._handlers: dict[type, Callable[[Any], None]] = {
            i.Tick: self._tick, i.Joined: self._joined, i.Heard: self._heard, i.Parted: self._parted,
            i.CarrierEnded: self._carrier_ended, i.AttemptWritten: self._attempt_written, i.SlurmSaid: self._slurm_said,
            i.NodesSeen: self._nodes_seen, i.Signalled: self._signalled, i.Forgiven: self._forgiven,
        }  # fmt: skip

    def hear(self, heard: i.Input) -> None:
        """Take one input."""
        handler = self._handlers.get(type(heard))
        if handler is not None:
            handler(heard)

    def _forgiven(self, heard: i.Forgiven) -> None:
        self._out.record("node_forgiven", node=heard.node)

    def lose(self, node: Node, why: str, *, silent: bool = False) -> None:
        """This node does not count any more."""
        since = self._out.wall - (self._out.now - node.heard)
        if node.conn is not None:
            self._out.put(i.Drop(node.conn, why))
        self.fleet.lose(node, self._out.now, since_wall=since, silent=silent)
        self._out.record("agent_lost", node=node.name, why=why, since=round(since, 3))
        self.hints.blame(node.name, None, Cause.NODE_LOST, since)
        if self.attempt is not None:
            self.attempt.lost(node.name, since=since, why=why)

    def own_up(self, attempt: Attempt) -> Origin | None:
        """Why an attempt has failed: it may be our own last absence that its agents stopped their ranks for."""
        since_s, frozen_s = self._out.now - self._woke_at, self._frozen_s
        if since_s < _AFTER_FREEZE_S and frozen_s > self._limits.agent_silence_s:
            detail = f"the supervisor itself was frozen for {frozen_s:.1f} s, so the agents stopped their ranks"
            attempt.evidence.add(Cause.UNKNOWN, t=self._out.wall - since_s - frozen_s, node="", detail=detail)
        return attempt.evidence.origin()

    def begin_without(self, names: Iterable[str], *, present: Collection[str], silent_s: float) -> None:
        """These are lost, and the others are not awaited for long.  ``present``: those of whom that is news."""
        for node in self.fleet.nodes.values():
            node.expected_until = self._out.now + REPLACE_S
        for name in names:
            node = self.fleet.nodes[name]
            node.heard = self._out.now - silent_s + _STOPPED_S
            if name in present:
                self.lose(node, f"silent for {silent_s:.1f} s", silent=True)
            else:
                self.fleet.lose(node, self._out.now, since_wall=self._out.wall - silent_s, silent=True)

    def start_agents(self) -> None:
        """Have an agent started wherever one is missing."""
        if self._out.now >= self._start_after and not self.leaving:
            for node in self.fleet.to_start(self._out.now):
                self.fleet.starting(node, self._out.now)
                self._out.put(i.StartAgent(node.name))

    # --- one handler for each kind of input ---------------------------------------------------------------------------

    def _tick(self, _: i.Tick) -> None:
        now = self._out.now
        gap, self._last_tick = now - self._last_tick, now
        if gap > self._frozen_after_s:
            self._woke_at, self._frozen_s = now, gap
            self.fleet.forget_silence(now, gap)
            self._out.record("supervisor_was_frozen", seconds=round(gap, 2))
        if now - self._looked_at < self._look_every_s:
            return
        self._looked_at = now
        for node, why, silent in self.fleet.overdue(now):
            self.lose(node, why, silent=silent)
        if self.attempt is not None and self.judging and self._is_time_to_judge(now, self.attempt.world):
            for event, fields, t in self.attempt.judge(self._limits, now=now, wall=self._out.wall):
                self._out.note(event, fields, t=t)
        self._live.tick(self.attempt if self.judging else None)
        self.start_agents()
        if not self.leaving:
            self.warnings.tick()
            self.drains.tick([node.name for node in self.fleet.nodes.values() if not node.gone])

    def _is_time_to_judge(self, now: float, world: int) -> bool:
        if now - self._judged_at < max(_JUDGE_EVERY_S, world / _RANKS_PER_S):
            return False
        self._judged_at = now
        return True

    def _joined(self, it: i.Joined) -> None:
        hello, node, spec = it.hello, self.fleet.nodes.get(it.hello.node), self._spec
        if node is None:
            self._out.put(i.Drop(it.conn, f"{hello.node} is not a node of this allocation", quit=True))
            return
        if (hello.job_id, hello.restart) != (spec.job_id, spec.restart):
            theirs, ours = f"{hello.job_id}.{hello.restart}", f"{spec.job_id}.{spec.restart}"
            self._out.put(i.Drop(it.conn, f"an agent of allocation {theirs}; this is {ours}", quit=True))
            return
        again = node.joined and (node.pid, node.boot_id) == (hello.pid, hello.boot_id)
        if node.joined and not again and node.lost_at is None:
            if node.conn is not None:
                self._out.put(i.Drop(node.conn, "another agent of this node took its place", quit=True))
                node.conn = None
            self.lose(node, "another agent took its place")
        replaced = self.fleet.join(it.conn, hello, self._out.now)
        if replaced is not None:
            self._out.put(i.Drop(replaced, "the same agent dialled again"))
        self._out.record("agent_joined", node=node.name, pid=hello.pid, boot_id=hello.boot_id, warm=hello.warm,
                         again=again or None, reason=hello.cold_reason or None)  # fmt: skip
        self.hints.joined(node.name, it.conn)
        mine = self.attempt if self.launching or self.adopting else None
        if self.leaving:
            self._out.send(it.conn, m.Quit("the run is ending"))
        elif mine is not None and mine.uses(node.name):
            self.fleet.hold([node.name], mine.number)
            mine.came_back(node.name, set(hello.ranks) if hello.attempt == mine.number else set(), self._out.now)
            if mine.preparing and mine.master_port is None and node.name == mine.nodes[0]:
                # What we asked of it may have gone into its old connection, which it had left without our knowing.
                self._out.send(it.conn, m.Store(mine.number))
        elif hello.ranks:
            self._out.send(it.conn, m.Kill(max(hello.attempt, self._out.attempt)))

    def _heard(self, it: i.Heard) -> None:
        node, message, out = self.fleet.of_conn(it.conn), it.message, self._out
        if node is None:
            return
        node.heard = out.now
        if self.attempt is not None and getattr(message, "attempt", None) == self.attempt.number:
            for event, fields, t in self.attempt.hear(node.name, message, now=out.now, wall=out.wall):
                out.note(event, fields, t=t)
        elif self.check is not None and getattr(message, "attempt", None) == self.check.number:
            self.check.hear(node.name, message)
        elif isinstance(message, m.Fact):
            event, fields, t = quote(node.name, message)
            out.note(event, fields, t=t, attempt=message.attempt)
        match message:
            case m.Stopped():
                self.fleet.release(node, message.attempt)
            case m.Warm():
                reason = message.reason if message.usable else ""
                self.fleet.warmed(node, out.now, warm=message.usable and message.warm, cold_reason=reason)
                why = message.reason or None
                out.record("agent_warm", node=node.name, warm=node.warm, reason=why, took_s=message.seconds)
            case m.Warned() if not self.leaving:
                self.warnings.hear(message.signal, message.t, node.name)
            case m.Refused():
                out.record("agent_refused", node=node.name, what=message.what, why=message.why)
            case m.Fact() if message.fact == "checkpoint_committed":
                self.committed = True

    def _parted(self, it: i.Parted) -> None:
        node = self.fleet.of_conn(it.conn)
        if node is not None:
            self.fleet.part(node, self._out.now, expected=self.leaving)

    def _carrier_ended(self, it: i.CarrierEnded) -> None:
        node = self.fleet.nodes[it.node]
        before = node.failed_starts
        self.fleet.carrier_ended(node, it.tail or f"it ended with code {it.code}")
        if node.failed_starts == before or self.leaving:
            return
        times, why = node.failed_starts, node.failure
        self._out.record("agent_start_failed", node=node.name, exit_code=it.code, detail=why, times=times)
        if it.code == ExitCode.CONFIG_ERROR:
            self.misfit = f"the agent of {node.name} could not work: {why}"

    def _attempt_written(self, it: i.AttemptWritten) -> None:
        if self.attempt is not None and it.number == self.attempt.number:
            self.attempt.written = True
        elif self.check is not None and it.number == self.check.number:
            self.check.written = True

    def _signalled(self, it: i.Signalled) -> None:
        if not self.leaving:
            self.warnings.hear(it.signal, it.t, "supervisor")

    def _nodes_seen(self, it: i.NodesSeen) -> None:
        if not self.leaving:
            self.drains.said(it)
            if self._leaves_for_maintenance:
                self.warnings.maintenance_at = it.maintenance_at

    def _slurm_said(self, it: i.SlurmSaid) -> None:
        record = it.verdict.record
        if record is not None and record.state.running and record.restarts == self._spec.restart and record.nodes:
            for name in self.fleet.remove_all_but(record.nodes):
                self._out.record("node_gone", node=name, why="Slurm took it out of the job")
        if not self.leaving:
            self.warnings.said(it.verdict)
