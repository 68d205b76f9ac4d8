"""What became of the job?  One look at it, through Slurm or, for a local run, at its process.

A look never calls something over that is not: a controller that does not answer, an accounting that lags, a record of a
run that Slurm is about to requeue all mean "not yet".
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_resilience._clock import boot_id
from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.slurm.cause import cause_of_state
from slurm_resilience.slurm.client import AccountingRecord, CommandClient, SlurmClient
from slurm_resilience.slurm.failures import NoSuchJob
from slurm_resilience.slurm.states import JobState
from slurm_resilience.slurm.waiting import Trouble, forgotten, help_job, revive, trouble

_OF_RUN = {"complete": JobState.COMPLETED, "failed": JobState.FAILED, "cancelled": JobState.CANCELLED}


@dataclass(frozen=True)
class Look:
    """The job as it is now.  ``final``: it will never run again.  ``source`` says who told us."""

    state: JobState
    final: bool
    source: str
    exit_code: int | None = None


class Handle(Protocol):
    """A way to look at a job and to end it."""

    def look(self) -> Look:
        """Ask once.  Never raises for a scheduler that does not answer."""
        ...

    def cancel(self) -> None:
        """End it for good.  Raises :class:`SlurmError` when that could not be asked for."""
        ...


class SlurmHandle:
    """A job in Slurm.

    Ids come round again: a record counts only if its script is ours (``script``), an accounting record only if it was submitted
    no earlier than ours (``submitted_at``, wall clock).
    """

    def __init__(
        self, job_id: str, *, script: str, submitted_at: float, run: RunFolder, client: SlurmClient | None = None
    ) -> None:
        self.job_id = job_id
        self._script = script
        self._submitted_at = submitted_at
        self._run = run
        self._client = client or CommandClient()

    def look(self) -> Look:
        try:
            record = self._client.job(self.job_id)
        except NoSuchJob:
            return self._gone()
        except SlurmError as error:
            return Look(JobState.UNKNOWN, False, f"the controller does not answer: {error.evidence or error.what}")
        if record.command and not record.command.endswith(self._script):
            return self._gone()  # the id belongs to somebody else's job by now
        if trouble(record, now=time.time()) is Trouble.ORPHAN:
            with contextlib.suppress(SlurmError):
                help_job(self._client, record)
        if forgotten(record):
            with contextlib.suppress(SlurmError):
                revive(self._client, record)
                return Look(JobState.PENDING, False, "Slurm had forgotten that the job was requeued")
        final = record.state.ended and record.state is not JobState.COMPLETING
        return Look(record.state, final, "scontrol", record.exit_code if final else None)

    def cancel(self) -> None:
        self._client.cancel(self.job_id)

    def ends(self) -> list[Cause | None]:
        """Why each run of the job ended, in the order of its restarts, as accounting has it; empty when it does not answer."""
        try:
            runs = [run for run in self._client.history(self.job_id) if (run.submit_at or 0.0) >= self._submitted_at - 60.0]
        except SlurmError:
            return []
        return [cause_of_state(run.state) for run in runs]

    def _gone(self) -> Look:
        """The controller has forgotten the job (MinJobAge after its end), so it is over; accounting or the run say how."""
        with contextlib.suppress(SlurmError):
            # a minute for clocks that differ
            ours = [
                record for record in self._client.history(self.job_id) if (record.submit_at or 0.0) >= self._submitted_at - 60.0
            ]
            if ours:
                return _accounted(ours[-1])
        return Look(_state_of_run(self._run.status(), JobState.UNKNOWN), True, "the run's folder; Slurm has forgotten the job")


def _accounted(record: AccountingRecord) -> Look:
    """The newest run of the job counts: the earlier ones may well be PREEMPTED or NODE_FAIL."""
    return Look(record.state, True, "sacct", record.exit_code)


class LocalHandle:
    """A run on this machine, as a process group.  ``started``: the leader's start time, since process ids come round again."""

    def __init__(self, pid: int, *, started: str, boot: str, run: RunFolder) -> None:
        self.pid = pid
        self._started = started
        self._boot = boot
        self._run = run

    def look(self) -> Look:
        if self._alive():
            return Look(JobState.RUNNING, False, f"process {self.pid}")
        status = self._run.status()
        return Look(_state_of_run(status, JobState.FAILED), True, "the run's folder", status.exit_code if status else None)

    def cancel(self) -> None:
        if self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def _alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # if it is our own child: a zombie is not alive
        return self._boot == boot_id() and process_started(self.pid) == self._started


class DoneHandle:
    """A run that was over when its job object was made."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def look(self) -> Look:
        status = self._run.status()
        return Look(_state_of_run(status, JobState.FAILED), True, "the run's folder", status.exit_code if status else None)

    def cancel(self) -> None:
        """Nothing: it is over."""


def process_started(pid: int) -> str:
    """When the process began, in clock ticks since boot; "" when it is gone.  Source: proc_pid_stat(5), field 22."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def _state_of_run(status: RunStatus | None, otherwise: JobState) -> JobState:
    return _OF_RUN.get(status.state, otherwise) if status else otherwise
