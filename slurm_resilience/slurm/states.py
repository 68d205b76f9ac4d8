"""All the states of a Slurm job, kept apart, and the one question that matters of each: can it still change?

Source: ``src/common/slurm_protocol_defs.c`` (job_state_string) of 22.05 to 25.11.
"""

from __future__ import annotations

import enum
import re


class JobState(str, enum.Enum):
    """Slurm's own words.  UNKNOWN is ours: nobody could tell, and that is never good news."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    EXPEDITING = "EXPEDITING"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    REQUEUE_FED = "REQUEUE_FED"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    RESIZING = "RESIZING"
    CONFIGURING = "CONFIGURING"
    COMPLETING = "COMPLETING"
    STOPPED = "STOPPED"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    POWER_UP_NODE = "POWER_UP_NODE"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    UPDATE_DB = "UPDATE_DB"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    def __str__(self) -> str:
        return self.value

    @property
    def ended(self) -> bool:
        """This run of the job is over.  Slurm may still requeue it after some of these: see ``may_return``."""
        return self in _ENDED

    @property
    def may_return(self) -> bool:
        """Slurm itself requeues jobs out of this state, so an accounting record of it proves nothing about the job."""
        return self in (JobState.PREEMPTED, JobState.NODE_FAIL, JobState.REQUEUED)

    @property
    def running(self) -> bool:
        """Its processes run.  Slurm shows SIGNALING instead of RUNNING while a node has not yet taken a signal (a node that
        is off never does), and RESIZING while nodes are taken out.
        """
        return self in (JobState.RUNNING, JobState.SIGNALING, JobState.RESIZING)

    @property
    def waiting(self) -> bool:
        """The job is in the queue, held or not."""
        return self in (JobState.PENDING, JobState.REQUEUED, JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT,
                        JobState.REQUEUE_FED, JobState.RESV_DEL_HOLD)  # fmt: skip


_ENDED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
        JobState.LAUNCH_FAILED,
        JobState.REVOKED,
    }
)

_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)")


def parse_state(text: str) -> JobState:
    """The state in ``text`` as any Slurm command writes it: ``CANCELLED by 1001``, ``COMPLETING*``, ``PENDING,COMPLETING``.

    Where several are listed (JSON, newer commands) COMPLETING wins, since it is the one that says "not yet".
    A word that we do not know gives UNKNOWN, never a guess.
    """
    text = text.strip().upper()
    if text.startswith("CANCELLED"):
        return JobState.CANCELLED
    words = [word.rstrip("*+") for word in re.split(r"[,|+\s]+", text) if word]
    if "COMPLETING" in words:
        return JobState.COMPLETING
    for word in words:
        try:
            return JobState(word)
        except ValueError:
            continue
    return JobState.UNKNOWN


def cancelled_by(text: str) -> int | None:
    """The user id in sacct's ``CANCELLED by 1001``; None where it is not said."""
    found = _CANCELLED_BY.search(text)
    return int(found.group(1)) if found else None
