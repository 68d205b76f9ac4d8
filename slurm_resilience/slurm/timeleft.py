"""How long may this job still live?  The deadline that the ranks' last save must meet, from Slurm's own numbers.

Nothing here is a guess about order or number of signals: it reads the controller's record of the job and the site's
settings.  When neither is known, the shortest time that Slurm ever gives is assumed.

Source: numbers measured on 22.05.8.  At the time limit and at the end of a grace period TERM goes to everybody, KILL
``KillWait`` later (the code uses at least 5 s).  During a grace period ``EndTime`` is the exact start of that kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_resilience.slurm.records import JobRecord

DEFAULT_KILL_WAIT_S = 30.0
_LEAST_KILL_WAIT_S = 5.0


@dataclass(frozen=True)
class Deadline:
    """``soft_at``: be gone by then and Slurm never has to kill; ``kill_at``: SIGKILL is sent (wall-clock seconds).

    ``source`` says in words which of Slurm's numbers this is.
    """

    soft_at: float
    kill_at: float
    source: str

    def left_s(self, now: float) -> float:
        """Seconds until ``soft_at``; never negative."""
        return max(0.0, self.soft_at - now)


def kill_wait_s(config: Mapping[str, str]) -> float:
    """Slurm's ``KillWait`` in seconds (``30 sec``), its default where the setting is not known."""
    return max(_LEAST_KILL_WAIT_S, _seconds(config.get("KillWait"), DEFAULT_KILL_WAIT_S))


def grace_s(partition: Mapping[str, str]) -> float:
    """The partition's ``GraceTime`` in seconds; 0 where it is not known, since that is Slurm's default and the worst."""
    return _seconds(partition.get("GraceTime"), 0.0)


def deadline(
    record: JobRecord | None,
    *,
    heard_at: float,
    kill_wait: float = DEFAULT_KILL_WAIT_S,
    margin_s: float = 2.0,
    grace: float | None = None,
) -> Deadline:
    """The deadline of a job that heard a warning at ``heard_at``.

    ``grace`` is the partition's GraceTime, where the caller knows it: Slurm shows no EndTime for a job without a time limit.
    ``margin_s`` is taken off ``soft_at`` for the way from the last save to the last exit.  An end that lies in the past,
    or a record that says nothing, falls back to ``heard_at + kill_wait``; so does an end that is nearer than that, because
    somebody has shortened the limit say: what begins then is no kill yet, and work that could be saved is worth the wait.
    """
    last_resort = Deadline(heard_at + kill_wait - margin_s, heard_at + kill_wait, "KillWait after the warning")
    end_at = record.end_at if record is not None else None
    if record is not None and end_at is None and record.preempt_at is not None and grace is not None:
        end_at = record.preempt_at + grace
    if record is None or not record.state.running or end_at is None or end_at < heard_at:
        # COMPLETING, requeued, cancelled: TERM has been sent to everybody, KILL follows KillWait later
        return last_resort
    soft_at = max(end_at, heard_at + kill_wait) - margin_s
    if record.preempt_at is not None:
        return Deadline(soft_at, end_at + kill_wait, "end of the grace period (PreemptTime is set)")
    return Deadline(soft_at, end_at + kill_wait, "time limit of the job")


def before_maintenance(start_at: float, name: str, otherwise: Deadline, *, margin_s: float = 2.0) -> Deadline:
    """Be gone when a maintenance begins; where it has begun there is as much time as ``otherwise``."""
    if start_at <= otherwise.soft_at:
        return otherwise
    return Deadline(start_at - margin_s, start_at, f"beginning of the maintenance reservation {name}")


def _seconds(text: str | None, default: float) -> float:
    word = (text or "").split()
    return float(word[0]) if word and word[0].isdigit() else default
