"""Where would an attempt on these nodes run, in the light of those before it?"""

from __future__ import annotations

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ConfigError
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.limits import Limits
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.planner import Placement, look_at, place
from slurm_resilience.runtime.scene import Scene
from slurm_resilience.runtime.spec import RunSpec


class Placing:
    """Layouts and attempts for one run; changes nothing."""

    def __init__(self, out: Outbox, scene: Scene, spec: RunSpec, config: ResilienceConfig) -> None:
        self._out, self._scene, self._spec, self._config = out, scene, spec, config

    def place(self, names: list[str]) -> Placement:
        """The layout on these nodes.  Raises :class:`ConfigError` when there is none."""
        spec, config, history, last = self._spec, self._config, self._out.history, self._scene.attempt
        nodes = look_at(names, config, gpus=spec.gpus, gpu_request=spec.gpu_request, suspects=history.suspects)
        return place(nodes, config, previous=history.mesh, before=last.nodes if last is not None else ())

    def fits(self, names: list[str]) -> bool:
        """There is a layout on these nodes."""
        try:
            self.place(names)
        except ConfigError:
            return False
        return True

    def attempt(self, placement: Placement) -> Attempt:
        """The attempt with the current number, which knows how long earlier ones of its size were silent at most."""
        world = len(placement.node_of())
        limits = Limits(self._config.limits, self._out.history.silences.get(world, {}))
        return Attempt(self._out.attempt, placement, now=self._out.now, limits=limits)
