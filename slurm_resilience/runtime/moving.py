"""Would the ranks of the running attempt be better off on other nodes?"""

from __future__ import annotations

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause, ConfigError
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
        """There are nodes to take in, right after a checkpoint was committed, and the mesh gets ranks out of them.

        It need not: with tp over two nodes a third one gives it none, and an attempt on it would be as small as this one.
        """
        scene, suspects = self._scene, self._out.history.suspects
        extra = reinforcements(attempt, scene.fleet, scene.drains, self._config, self._out.now, suspects)
        if not extra:
            return False
        try:
            larger = self._placing.place([name for name in scene.fleet.nodes if attempt.uses(name) or name in extra])
        except ConfigError:
            return False
        if larger.world <= attempt.world:
            return False
        new = ", ".join(name for name in larger.nodes if not attempt.uses(name))
        self._out.record("decided", action="grow", reason=f"{new} can be used again, and a checkpoint has just been committed")
        return True

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
