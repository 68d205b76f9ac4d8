"""How far the run is, in ``state.json``: kept current to a few seconds and to the checkpoint, for those who look."""

from __future__ import annotations

from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.inputs import WriteStatus
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.run_folder import RunStatus

_EVERY_S = 5.0


class StepNote:
    """Has the step written when there is a new one."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._step: int | None = None
        self._at = out.now

    def keep(self, attempt: Attempt | None, *, committed: bool) -> None:
        """``attempt`` is the one that runs; ``committed``: a checkpoint has just been."""
        step = attempt.reached if attempt is not None else None
        if step is not None and step != self._step and (committed or self._out.now - self._at >= _EVERY_S):
            self._step, self._at = step, self._out.now
            self._out.put(WriteStatus(RunStatus("running", step=step)))
