"""What have the ranks been told: to save, to stop, to be killed?"""

from __future__ import annotations

from typing import Any

from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.fleet import Fleet
from slurm_resilience.runtime.messages import Kill, Order
from slurm_resilience.runtime.outbox import Outbox

_REKILL_S = 2.0
# A loop that asks run.should_stop(), or takes steps, answers well before.
_UNHEARD_S = 8.0


class RankOrders:
    """Tells the agents, and keeps what was said so that it is repeated only when it has to be."""

    def __init__(self, out: Outbox, fleet: Fleet) -> None:
        self._out, self._fleet = out, fleet
        self._saves = 0
        self._stop: tuple[float | None, str] | None = None
        self._killed_at = out.now
        self._asked_at, self._asked_step = float("inf"), -1

    def save(self, attempt: Attempt | None, *, cause: str) -> None:
        """Have the ranks save and go on; without a running attempt the next order carries it."""
        self._saves += 1
        if attempt is not None:
            self._tell(attempt, Order(self._out.attempt, stop=False, save=self._saves, deadline=None, cause=cause))

    def forget_stop(self) -> None:
        """Another stop begins: whatever was said of the last one does not count."""
        self._stop, self._asked_at = None, float("inf")

    def stop(self, attempt: Attempt, *, deadline: float | None, cause: str) -> None:
        """Have the ranks save and stop; said again only when there is more or less time for it than they were told."""
        if (deadline, cause) != self._stop:
            self._stop = (deadline, cause)
            if self._asked_at == float("inf"):
                self._asked_at, self._asked_step = self._out.now, attempt.step
            self._tell(attempt, Order(self._out.attempt, stop=True, save=self._saves, deadline=deadline, cause=cause))
        elif self._out.now - self._asked_at >= _UNHEARD_S:
            self._say_unheard(attempt)

    def kill(self, look: str = "") -> None:
        """Have everything killed on each node that may hold ranks; ``look``: what to look at there first."""
        self._killed_at = self._out.now
        for node in self._fleet.nodes.values():
            if node.holds:
                self._out.send(node.conn, Kill(self._out.attempt, look=look))

    def kill_again(self) -> None:
        """The same once more, when the last time is a while ago."""
        if self._out.now - self._killed_at > _REKILL_S:
            self.kill()

    def _say_unheard(self, attempt: Attempt) -> None:
        """Once for each stop, where nobody has come to the end of a step since: it may not be noticed before it is too late."""
        waited, self._asked_at = self._out.now - self._asked_at, float("-inf")
        if waited == float("inf") or attempt.facts.said("stopped") or attempt.step > self._asked_step + 1:
            return
        where: dict[str, Any] = {}
        for rank, look in attempt.as_looks().items():
            if look.sections and not look.done:
                inner = look.sections[-1]
                where = {"rank": rank, "section": inner.name, "section_s": round(inner.total_s, 1)}
                break
        self._out.record("stop_not_heard", waited_s=round(waited, 1), **where)

    def _tell(self, attempt: Attempt, order: Order) -> None:
        for name in attempt.nodes:
            self._out.send(self._fleet.nodes[name].conn, order)
