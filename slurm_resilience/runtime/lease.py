"""May this node still run its ranks?  Pure arithmetic on monotonic times of this node.

The supervisor gives a node up ``lost_s`` after it last heard from it, and launches elsewhere; so this node has to have
stopped its ranks before, whether it was cut off, or was stopped itself for a while and woke up with an old view.
"""

from __future__ import annotations

FROZEN_S = 1.0  # a turn of the loop that took longer: this process was stopped, or starved
_GRACE_S = 0.5  # for the answer to the beat that an agent sends when it wakes up
_MARGIN_S = 0.75  # for killing
_HELD_S = 2.0  # for an answer, while nothing runs here


class Lease:
    """Runs from ``since``, the moment when the beat was sent that the supervisor last acknowledged."""

    def __init__(self, silence_s: float, lost_s: float, now: float) -> None:
        self._silence_s, self._lost_s = silence_s, lost_s
        self.since = now
        self._grace_until = now

    def renew(self, sent: float) -> None:
        """The supervisor says that it has heard what was sent then.  Old news never shortens a lease."""
        self.since = max(self.since, sent)

    def wake(self, now: float) -> None:
        """This process was stopped until now.

        Being late is no proof of being given up, but no excuse either: wait a moment for an answer, as long as the
        supervisor cannot have launched elsewhere.
        """
        self._grace_until = min(now + _GRACE_S, self.hard_end())

    def hold(self, now: float) -> float:
        """This process was stopped until now, for so long that the ranks may have been given up; they are stopped, and wait.

        All of the job may have been suspended, the supervisor too: it is asked.  Returns until when.
        """
        self._grace_until = now + _HELD_S
        return self._grace_until

    def age(self, now: float) -> float:
        """Seconds since the supervisor can be proven to have heard this node."""
        return now - self.since

    def hard_end(self) -> float:
        """When nothing may run here any more, whoever has to see to it."""
        return self.since + self._lost_s - _MARGIN_S

    def has_ended(self, now: float) -> bool:
        """Whether the ranks must be stopped now."""
        return self.age(now) > self._silence_s and now > self._grace_until
