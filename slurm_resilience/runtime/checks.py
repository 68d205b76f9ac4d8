"""Are the nodes to be checked before the next attempt, and what has come of it?"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.runtime.checking import Checking
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.scene import Scene
from slurm_resilience.runtime.spec import RunSpec

_UNEXPLAINED = 2


def reason_to_check(mode: str, history: History, *, nodes: int, fault: bool) -> str:
    """Why the nodes are to be checked before the next attempt, "" when they are not.  ``fault``: one ended the last attempt."""
    if mode == "off" or nodes <= 1:  # there has to be somebody to compare with
        return ""
    if mode == "always":
        return "node_check is always"
    if not fault or history.pretends or history.unexplained < _UNEXPLAINED:
        return ""
    return f"{history.unexplained} faults without progress that a node may be to blame for"


class Checks:
    """One check at most before each attempt."""

    def __init__(self, out: Outbox, scene: Scene, spec: RunSpec, config: ResilienceConfig) -> None:
        self._out, self._scene, self._spec, self._config = out, scene, spec, config
        self._done_by = 0

    def begin(self, names: Sequence[str], *, fault: bool) -> bool:
        """Begin one if that is wanted, and has not just been done; True when it has begun."""
        reason = reason_to_check(self._config.node_check, self._out.history, nodes=len(names), fault=fault)
        if not reason or (self._done_by and self._done_by == self._out.attempt):
            return False
        limit_s = self._config.limits.check_s
        self._scene.check = Checking(self._out, self._scene.fleet, self._spec, names, limit_s=limit_s, reason=reason)
        return True

    def over(self, *, must_end: bool) -> bool:
        """The one that is under way has nothing more to wait for."""
        check = self._scene.check
        assert check is not None
        if must_end:
            check.cut("everything has to end")
        return check.over()

    def finish(self) -> None:
        """Nothing of it is alive any more."""
        check = self._scene.check
        assert check is not None
        self._done_by = check.number
        check.finish()
