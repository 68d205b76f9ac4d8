"""Would the ranks of the running attempt be better off on other nodes?"""

from __future__ import annotations

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.drain_watch import Move
from slurm_resilience.runtime.launching import reinforcements
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.placing import Placing
from slurm_resilience.runtime.scene import Scene
from slurm_resilience.runtime.spec import RunSpec


class Moving:
    """Decides, and puts on record why; having the ranks save and end is the coordinator's."""

    def __init__(self, out: Outbox, scene: Scene, spec: RunSpec, config: ResilienceConfig, placing: Placing) -> None:
        self._out, self._scene, self._spec, self._config, self._placing = out, scene, spec, config, placing

    def grows(self, attempt: Attempt) -> bool:
        """There are nodes to take in, right after a checkpoint was committed."""
        scene, suspects = self._scene, self._out.history.suspects
        extra = reinforcements(attempt, scene.fleet, scene.drains, self._config, self._out.now, suspects)
        if extra:
            reason = f"{', '.join(extra)} can be used again, and a checkpoint has just been committed"
            self._out.record("decided", action="grow", reason=reason)
        return bool(extra)

    def away(self, attempt: Attempt) -> Move | str | None:
        """The move off drained nodes to make now, or why the attempt stays on them, once each; None for nothing new."""
        config, out = self._config, self._out
        if not self._scene.drains.has_news:  # asked after every input, and there are thousands a second
            return None
        if attempt.reached is None:  # who reports no step can save none, and would lose all of it by leaving
            return None
        ready = self._scene.fleet.ready(out.now, need_warm=config.warm)
        can = config.requeue and self._spec.can_requeue
        fewest, fits = config.nodes[0], self._placing.fits
        move = self._scene.drains.move(attempt.nodes, ready, fewest=fewest, fits=fits, can_requeue=can)
        if isinstance(move, str):
            out.record("decided", action="stay", reason=move, cause=str(Cause.NODE_DRAINED))
        elif move is not None:
            out.record("warning_received", signal="drain", source="slurm")
            out.record("warning_explained", cause=str(Cause.NODE_DRAINED), detail=move.reason)
            out.record("decided", action="move", reason=move.reason, cause=str(Cause.NODE_DRAINED))
        return move
