"""What becomes of the attempt that was running when the supervisor before us died?"""

from __future__ import annotations

from slurm_resilience.errors import Cause
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.placing import Placing
from slurm_resilience.runtime.planner import Placement
from slurm_resilience.runtime.scene import Scene
from slurm_resilience.runtime.spec import Takeover


class Inheritance:
    """Puts the open attempt on the scene; what follows is the coordinator's to decide."""

    def __init__(self, out: Outbox, scene: Scene, placing: Placing) -> None:
        self._out, self._scene, self._placing = out, scene, placing

    def adopt(self) -> bool:
        """What a dead supervisor had running may still run: its agents decide that when they dial again.  False: nothing."""
        self._scene.attempt = self._open_attempt()
        return self._scene.attempt is not None

    def take_over(self, takeover: Takeover) -> bool:
        """The supervisor is lost with its node.  The agents that are left have stopped their ranks, or are about to.

        True when that ended an attempt.
        """
        present, node = self._out.history.present, takeover.node
        names = list(self._scene.fleet.nodes)
        lost = [name for name in names if name not in present or name == node]
        self._out.record("supervisor_took_over", node=node, silent_s=round(takeover.silent_s, 1), nodes=names, lost=lost)
        since = self._out.wall - takeover.silent_s
        self._scene.begin_without(lost, present=frozenset(present), silent_s=takeover.silent_s)
        started = self._open_attempt()
        if started is None:
            return False
        self._scene.attempt = started
        why = f"nothing was heard from {node}, which the supervisor was on, for {takeover.silent_s:.1f} s"
        started.lost(node, since=since, why=why)
        if not started.evidence.seen:
            started.evidence.add(Cause.UNKNOWN, t=since, node="", detail=f"{why}, so the agents stopped their ranks")
        return True

    def _open_attempt(self) -> Attempt | None:
        """The attempt that was running when the supervisor before us died; None when there was none."""
        started = self._out.history.open_attempt
        if not started or int(started["attempt"]) != self._out.attempt:
            return None
        if not set(started["nodes"]) <= set(self._scene.fleet.nodes):
            return None
        return self._placing.attempt(Placement.of_plan(dict(started["plan"])))
