"""An actor outside of the jobs that gets requeued ones started in seconds: on a login node, as their own user.

It looks at the user's jobs with one ``squeue``, rarely while nothing is on its way and often while something is.  A job
that Slurm keeps back after a requeue is given StartTime=now, once it has been PENDING for 1.2 s: earlier, slurmctld
overwrites the time when the job leaves COMPLETING, and in the very second of that it can lose the job.  Then it looks
whether the job really goes, and repeats.  It needs nothing from the job's own supervisor, which may have died with its node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.client import QueueEntry, SlurmClient
from slurm_resilience.slurm.failures import NoSuchJob
from slurm_resilience.slurm.mark import Marks
from slurm_resilience.slurm.states import JobState
from slurm_resilience.slurm.waiting import Trouble, forgotten, help_job, revive, trouble

# Source: measured on 22.05.8.
SETTLED_S = 1.2
_BUSY_EVERY_S = 0.4
_AGAIN_S = 2.0
_MOST_TRIES = 10
# Told, but not helped: tried again after this long, since nodes and minds change.
_EXPLAIN_EVERY_S = 300.0


@dataclass
class _Seen:
    """What this process knows of one job in the queue (monotonic times)."""

    since: float
    tries: int = 0
    asked_at: float = float("-inf")
    helped_at: float = float("-inf")


class Watch:
    """``tell(job_id, what, **facts)`` hears what happens.  ``all_jobs``: also those that carry no mark of ours.

    Without ``act`` it only says what it would do.
    """

    def __init__(
        self,
        client: SlurmClient,
        user: str,
        *,
        tell: Callable[..., None],
        every_s: float = 2.0,
        all_jobs: bool = False,
        act: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client, self._user, self._tell, self._clock = client, user, tell, clock
        self._every_s, self._all, self._act = every_s, all_jobs, act
        self._seen: dict[str, _Seen] = {}
        self._silent = False
        self._ran: set[str] = set()  # jobs that were there at the last look

    def round(self) -> float:
        """Look once and do what helps; how long to wait before the next look.  Never raises for Slurm's failures."""
        try:
            entries = self._client.queue(self._user)
        except SlurmError as error:
            if not self._silent:
                self._tell("", "no_answer", detail=error.evidence or error.what)
            self._silent = True
            return self._every_s
        if self._silent:
            self._tell("", "answers_again")
        self._silent = False
        busy = [self._tend(entry) for entry in entries]
        known = {entry.job_id for entry in entries}
        for job_id in [name for name in self._seen if name not in known]:
            self._started(job_id, "it has left the queue")
        for job_id in self._ran - known:
            self._look_back(job_id)
        self._ran = {entry.job_id for entry in entries if self._all or Marks.read(entry.comment).ours}
        return _BUSY_EVERY_S if any(busy) else self._every_s

    def _tend(self, entry: QueueEntry) -> bool:
        """True while this job is on its way from one run to the next."""
        if not (self._all or Marks.read(entry.comment).ours):
            return False
        if entry.state is JobState.COMPLETING or (entry.state.running and Marks.read(entry.comment).held_at is not None):
            return True
        if not entry.state.waiting or not entry.needs_a_look:
            self._started(entry.job_id, str(entry.state).lower() if not entry.state.waiting else f"waits for {entry.reason}")
            return False
        now = self._clock.monotonic()
        try:
            record = self._client.job(entry.job_id)
            kind = trouble(record, now=self._clock.time())
            if kind is Trouble.NONE:
                return False
            seen = self._seen.setdefault(entry.job_id, _Seen(now))
            if kind is Trouble.SLOW:
                return self._hasten(entry.job_id, seen, now)
            if now - seen.helped_at < _EXPLAIN_EVERY_S:
                return False
            seen.helped_at = now
            if not self._act:
                self._say(entry.job_id, "found", trouble=str(kind), detail=f"Reason={record.reason}")
                return False
            done = help_job(self._client, record, clock=self._clock)
            self._say(entry.job_id, "released" if done.helped else "cannot_start", trouble=str(kind), detail=done.said)
            return done.helped
        except NoSuchJob:
            return False
        except SlurmError as error:
            self._say(entry.job_id, "refused", detail=error.evidence or error.what)
            return False

    def _look_back(self, job_id: str) -> None:
        """A job is over: for good, unless it had requeued itself and the controller has forgotten that."""
        try:
            record = self._client.job(job_id)
            if not forgotten(record):
                return
            if self._act:
                revive(self._client, record)
            what = "Slurm had forgotten that it was requeued"
            self._say(job_id, "released" if self._act else "found", trouble="forgotten", detail=what)
        except SlurmError as error:
            if not isinstance(error, NoSuchJob):
                self._say(job_id, "refused", detail=error.evidence or error.what)

    def _hasten(self, job_id: str, seen: _Seen, now: float) -> bool:
        if now - seen.since < SETTLED_S or now - seen.asked_at < _AGAIN_S:
            return True
        if seen.tries >= _MOST_TRIES:
            return False
        seen.tries, seen.asked_at = seen.tries + 1, now
        if not self._act:
            self._say(job_id, "found", trouble="slow", detail="StartTime=now would start it")
            seen.tries = _MOST_TRIES
            return False
        self._client.update(job_id, StartTime="now")
        if seen.tries == _MOST_TRIES:
            self._say(job_id, "cannot_start", trouble="slow", detail=f"StartTime=now did not help, {seen.tries} times")
        return True

    def _started(self, job_id: str, what: str) -> None:
        seen = self._seen.pop(job_id, None)
        if seen is not None and seen.tries and self._act:
            waited = self._clock.monotonic() - seen.since
            self._say(job_id, "expedited", detail=what, waited_s=round(waited, 1), tries=seen.tries)

    def _say(self, job_id: str, what: str, **facts: Any) -> None:
        self._tell(job_id, what, **facts)
