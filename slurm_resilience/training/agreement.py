"""What do all ranks do after this step?  Decided together, one step late, without a stall.

Each rank says after each step what it was asked for.  The all-reduce of these wishes starts at the end of one step and is
read at the end of the next, so it runs behind the computation, and every rank acts on the same answer after the same step,
however late the order reached it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurm_resilience.errors import Cause
from slurm_resilience.training.world import World

_CAUSES = [*map(str, Cause), "SIGTERM", "SIGUSR2"]  # numbers cross the ranks; the signals are for runs without an agent
_NEVER = -(1 << 62)


@dataclass(frozen=True)
class Wish:
    """What a rank, or all of them together, wants.

    ``save`` is the number of the last save that was ordered (it only grows); ``timed`` that the minutes since the last save are
    over; ``deadline`` wall-clock seconds by which everything must have ended, the earliest of all ranks.
    """

    stop: bool = False
    cause: str = ""
    save: int = 0
    timed: bool = False
    deadline: float | None = None

    def _numbers(self) -> list[int]:
        code = 0
        if self.stop:
            code = 1 + _CAUSES.index(self.cause if self.cause in _CAUSES else str(Cause.UNKNOWN))
        return [code, self.save, int(self.timed), _NEVER if self.deadline is None else -round(self.deadline * 1000)]

    @classmethod
    def _of(cls, numbers: list[int]) -> Wish:
        code, save, timed, deadline = numbers
        return cls(
            stop=code > 0,
            cause=_CAUSES[code - 1] if code else "",
            save=save,
            timed=bool(timed),
            deadline=None if deadline == _NEVER else -deadline / 1000,
        )


class Agreement:
    """The wishes of all ranks, joined by their maximum.  All ranks make the same calls in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: tuple[Any, torch.Tensor] | None = None

    def next(self, mine: Wish) -> Wish:
        """What all ranks wished at the previous call; ``mine`` is on its way.  A world of one gets its answer at once."""
        if self._world.control is None:
            return mine
        agreed = self.drain()
        tensor = torch.tensor(mine._numbers())
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        self._pending = (work, tensor)
        return agreed

    def now(self, mine: Wish) -> Wish:
        """What all ranks wish at this very call; waits for the slowest."""
        if self._world.control is None:
            return mine
        tensor = torch.tensor(mine._numbers())
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._world.control)
        return Wish._of(tensor.tolist())

    def drain(self) -> Wish:
        """The answer that is still on its way, so that none is left behind."""
        if self._pending is None:
            return Wish()
        work, tensor = self._pending
        self._pending = None
        with self._world.waiting():
            work.wait()
        return Wish._of(tensor.tolist())
