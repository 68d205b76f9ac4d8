"""Calls to Slurm about one job, asked again while the controller does not answer and there is time, and kept on record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.failures import CommandTimeout, ControllerUnreachable
from slurm_resilience.slurm.preemption import ask_preemption
from slurm_resilience.slurm.records import JobRecord

_T = TypeVar("_T")


@dataclass(frozen=True)
class Step:
    """One call of the recipe, for the event file: what was asked, what came of it, how long it took."""

    call: str
    result: str
    seconds: float


class Patient:
    """``until``: monotonic time after which a controller that does not answer is not asked again."""

    def __init__(self, client: SlurmClient, job_id: str, *, until: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self.client, self.job_id, self.clock = client, job_id, clock
        self.steps: list[Step] = []
        self._until = until

    def must(self, call: str, action: Callable[[], _T]) -> _T:
        """Do it, again and again while the controller does not answer and there is time.  Raises what Slurm said."""
        while True:
            started = self.clock.monotonic()
            try:
                value = action()
            except SlurmError as error:
                self.steps.append(Step(call, error.evidence or error.what, self.clock.monotonic() - started))
                if isinstance(error, (ControllerUnreachable, CommandTimeout)) and self.clock.monotonic() < self._until:
                    time.sleep(0.5)
                    continue
                raise
            self.steps.append(Step(call, "ok", self.clock.monotonic() - started))
            return value

    def attempt(self, call: str, action: Callable[[], _T]) -> _T | None:
        """The same for a wish: None where Slurm refuses, which the steps keep on record."""
        try:
            return self.must(call, action)
        except SlurmError:
            return None

    def update(self, **fields: str) -> None:
        """Change fields of the job, once."""
        self.client.update(self.job_id, **fields)

    def wish(self, call: str, **fields: str) -> bool:
        """Change fields of the job if Slurm lets us."""

        def change() -> bool:
            self.update(**fields)
            return True

        return self.attempt(call, change) is True

    def look(self) -> JobRecord | None:
        """The job's record, where it is to be had."""
        return self.attempt("show job", lambda: self.client.job(self.job_id))

    def partition(self, record: JobRecord) -> Mapping[str, str]:
        """The settings of the job's partition; empty where they are not to be had."""
        return self.attempt("show partition", lambda: self.client.partition(record.partition)) or {}

    def preemption(self, record: JobRecord) -> Mapping[str, str]:
        """What becomes of the job when it is preempted; empty where that is not to be had."""
        return self.attempt("show partition", lambda: ask_preemption(self.client, record.partition, record.qos)) or {}
