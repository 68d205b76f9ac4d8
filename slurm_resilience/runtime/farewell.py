"""The end of a supervisor: agents sent home, the job given back to Slurm where that was decided, the state written down."""

from __future__ import annotations

import enum
from dataclasses import replace

from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime.fleet import Fleet
from slurm_resilience.runtime.messages import Quit
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.policy import Decision
from slurm_resilience.runtime.run_folder import RunState, RunStatus
from slurm_resilience.runtime.spec import RunSpec

_CLOSE_S = 6.0


class Leaving(str, enum.Enum):
    """How far the end has come."""

    CLOSING = "closing"
    REQUEUEING = "requeueing"
    ENDED = "ended"


class Farewell:
    """Carries one final decision out.  ``step``: how far the run had come, None when it had not begun."""

    def __init__(self, outbox: Outbox, fleet: Fleet, spec: RunSpec, decision: Decision, *, step: int | None) -> None:
        self._outbox, self._fleet, self._spec, self._decision, self._step = outbox, fleet, spec, decision, step
        self._since = outbox.now
        self.state = Leaving.CLOSING
        if decision.exit_code != ExitCode.OK:
            why = {"cause": str(decision.cause), "by_hand": decision.by_hand or None}
            outbox.record("decided", action=decision.action, reason=decision.reason, **why)
        for node in fleet.nodes.values():
            outbox.send(node.conn, Quit(decision.reason[:200]))

    def advance(self) -> None:
        """Go on once nobody is left: the recipe needs every agent gone, or Slurm's hold of two minutes is back."""
        if self.state is not Leaving.CLOSING:
            return
        nodes = self._fleet.nodes.values()
        left = [node.name for node in nodes if node.connected or (node.carrier and node.lost_at is None)]
        if left and self._outbox.now - self._since <= _CLOSE_S:
            return
        if left:
            self._outbox.record("agents_left_behind", nodes=left)
        if self._decision.action != "requeue":
            self._finish(self._decision)
            return
        lost = {node.name: node.lost_wall for node in nodes if node.lost_at is not None and not node.gone}
        asked = self._spec.requeue_nodes
        self._outbox.record("requeue_started", nodes=list(asked) if asked else None, lost=sorted(lost) or None)
        self.state = Leaving.REQUEUEING
        self._outbox.put(i.Requeue(asked, lost, tuple(self._outbox.history.suspects)))

    def requeue_ended(self, it: i.RequeueEnded) -> None:
        """The recipe has run."""
        self._outbox.record("requeue_done" if it.ok else "requeue_failed", **it.fields)
        if it.ok and it.fields.get("action") == "resubmitted":
            # Not 75: a site may requeue jobs that end with it (RequeueExit), and not 0: the run is not complete.
            self._end("requeued", self._decision, self._decision.exit_code)
        elif it.ok:
            self._end("requeued", self._decision, ExitCode.REQUEUED)
        else:
            reason = f"{self._decision.reason}; but {it.reason}"
            self._finish(replace(self._decision, action="stop", reason=reason, nodes=()))

    def _finish(self, decision: Decision) -> None:
        if decision.exit_code == ExitCode.OK:
            self._end("complete", decision, ExitCode.OK)
            return
        code = int(decision.exit_code)
        why = {"cause": str(decision.cause), "by_hand": decision.by_hand or None}
        self._outbox.record("run_failed", **why, reason=decision.reason, exit_code=code)
        self._end("cancelled" if decision.cause is Cause.CANCELLED else "failed", decision, decision.exit_code)

    def _end(self, state: RunState, decision: Decision, code: ExitCode) -> None:
        cause = "" if code == ExitCode.OK else str(decision.cause)
        self._outbox.put(i.WriteStatus(RunStatus(state, cause, decision.reason, int(code), self._step)))
        self._outbox.put(i.Finish(int(code)))
        self.state = Leaving.ENDED
