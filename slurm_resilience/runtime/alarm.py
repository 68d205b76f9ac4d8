"""One warning, from its first signal to its explanation: what is ordered at once, what waits for Slurm's word, until when.

TERM is obeyed before anybody knows why; a user signal (USR1, USR2) only once Slurm names a cause, since it may just as
well be somebody's wish for a checkpoint.  A cause that was named once is kept when later answers say less: a
requeue wipes PreemptTime.
"""

from __future__ import annotations

from dataclasses import replace

from slurm_resilience.errors import Cause
from slurm_resilience.slurm.cause import Verdict
from slurm_resilience.slurm.timeleft import Deadline

USER_SIGNALS = frozenset({"SIGUSR1", "SIGUSR2"})
ASK_EVERY_S = 1.0
# A record that explains nothing for this long is itself the answer.
SETTLE_S = 3.0
# A controller that was away may have been killed, and forgets what it had not yet saved: also a preemption, which it finds
# out again when it next schedules.
AFTER_OUTAGE_S = 10.0
# An answer that took longer: scontrol itself waits some seconds for a controller that is away, without a word.
PROMPT_S = 1.0
# Agents and batch script hear the same signal within this time; one that comes later is a new one, and means "now".
SAME_S = 3.0


class Alarm:
    """``since`` is monotonic, ``heard_at`` and ``until`` are wall clock."""

    def __init__(self, signal: str, *, heard_at: float, now: float, until: float) -> None:
        self.signal = signal
        self.heard_at = heard_at
        self.since = now
        self.until = until
        self.verdict: Verdict | None = None
        self.asked_at = float("-inf")
        self._named: Cause | None = None
        self._away_at = float("-inf")  # when Slurm could last not be asked

    @property
    def urgent(self) -> bool:
        """The ranks are told to stop before anybody knows why."""
        return self.signal not in USER_SIGNALS

    @property
    def cause(self) -> Cause:
        """UNKNOWN until Slurm has named one."""
        return self.verdict.cause if self.verdict else Cause.UNKNOWN

    @property
    def named(self) -> bool:
        """Slurm has named a cause, or whoever requeued the job."""
        return self.verdict is not None and self.verdict.named

    @property
    def must_end(self) -> bool:
        return self.urgent or self.named or (self.verdict is not None and self.verdict.requeued)

    def again(self, signal: str, now: float) -> bool:
        """Note one more signal; True when it is news: more urgent than the first, or well after it."""
        worse = not self.urgent and signal not in USER_SIGNALS
        if worse:
            self.signal = signal
        return worse or now - self.since > SAME_S

    def explain(self, verdict: Verdict, now: float) -> bool:
        """Note an answer; True when it says something new."""
        if not verdict.known or verdict.waited_s > PROMPT_S:
            self._away_at = now
        settled = now - self.since > SETTLE_S and now - self._away_at > AFTER_OUTAGE_S
        running = verdict.record is not None and verdict.record.state.running
        if not verdict.named and verdict.requeued and self.verdict is not None and self.verdict.by_hand:
            verdict = replace(verdict, by_hand=self.verdict.by_hand, detail=self.verdict.detail)
        elif not verdict.named and self._named is not None:
            verdict = replace(verdict, cause=self._named, detail=f"{self._named} before; now {verdict.detail}")
        elif not verdict.named and running and settled and self.urgent:
            detail = f"{self.signal}, and Slurm has no reason to send one: taken as a wish to end ({verdict.detail})"
            verdict = replace(verdict, cause=Cause.CANCELLED, detail=detail)
        elif verdict.cause is not Cause.UNKNOWN and not verdict.requeued:
            self._named = verdict.cause
        before, self.verdict = self.verdict, verdict
        said = (verdict.cause, verdict.by_hand, verdict.requeued)
        return before is None or (before.cause, before.by_hand, before.requeued) != said

    def save_only(self, now: float) -> bool:
        """Slurm sees no end coming, and has been asked for long enough: a checkpoint is wanted, no more."""
        return not self.must_end and self.verdict is not None and self.verdict.known and now - self.since > SETTLE_S

    def conclusive(self, now: float, *, patience_s: float) -> bool:
        """Asking again would tell nothing more, or there is no time for it."""
        if self.verdict is None:
            return False
        since = max(self.since, self._away_at) if self.verdict.known else self.since
        return self.named or self.verdict.requeued or now - since > patience_s


def local_verdict(signal: str, *, heard_at: float, grace_s: float) -> Verdict:
    """Without Slurm a user signal plays a preemption, and TERM or INT means the end."""
    limit = Deadline(heard_at + grace_s, heard_at + grace_s, "limits.stop_grace_s")
    cause = Cause.PREEMPTION if signal in USER_SIGNALS else Cause.CANCELLED
    return Verdict(cause, False, limit, f"{signal} to a local run", True, None)
