"""[torch] Ranks that act together: what fails on one fails on all, with the rank and the reason, and nobody waits for ever.

Each stage of a save or a load runs on its own on every rank and ends in one exchange over a CPU (gloo) group: a stuck
peer costs that group's time-out, a dead one a closed connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from slurm_resilience.errors import CheckpointError, ResilienceError

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class _Outcome(Generic[T]):
    """What one rank's part of a stage came to.  ``original`` stays on its rank; ``error`` travels."""

    value: T | None = None
    error: ResilienceError | None = None
    original: BaseException | None = None

    def portable(self) -> tuple[T | None, ResilienceError | None]:
        return self.value, self.error


class Team:
    """The ranks of one process group; one rank alone when there is no group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._first = 0 if group is None or self.world == 1 else dist.get_global_rank(group, 0)

    @classmethod
    def alone(cls) -> Team:
        """This rank by itself, whatever process groups there are."""
        team = cls.__new__(cls)
        team.group, team.rank, team.world, team._first = None, 0, 1, 0
        return team

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, stage: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; returns this rank's result.  Raises on every rank when it failed on one."""
        mine = _try(work)
        if self.world > 1:
            errors: list[Any] = [None] * self.world
            self._exchange(stage, lambda: dist.all_gather_object(errors, mine.error, group=self.group))
        else:
            errors = [mine.error]
        self._judge(stage, errors, mine)
        return cast(T, mine.value)

    def funnel(self, stage: str, work: Callable[[], T], lead: Callable[[list[T]], R]) -> R:
        """Do ``work`` on every rank, then ``lead`` with all results on rank 0; every rank gets what ``lead`` returned."""
        mine = _try(work)
        led = self._lead(stage, mine, lead)
        if self.world > 1:
            box: list[Any] = [led if self.leads else None]
            self._exchange(stage, lambda: dist.broadcast_object_list(box, src=self._first, group=self.group))
            led = box[0]
        assert led is not None
        errors, value = led
        self._judge(stage, errors, mine)
        return cast(R, value)

    def deal(self, stage: str, work: Callable[[], T], lead: Callable[[list[T]], list[R]]) -> R:
        """Do ``work`` on every rank, then ``lead`` with all results on rank 0; every rank gets its part of what it returned."""
        mine = _try(work)
        led = self._lead(stage, mine, lead)
        if led is not None:
            errors, parts = led
            hands: list[Any] = [(errors, parts[rank] if parts else None) for rank in range(self.world)]
        else:
            hands = [None] * self.world
        if self.world > 1:
            box: list[Any] = [None]
            hands_or_none = hands if self.leads else None
            self._exchange(stage, lambda: dist.scatter_object_list(box, hands_or_none, src=self._first, group=self.group))
            hands[self.rank] = box[0]
        errors, value = hands[self.rank]
        self._judge(stage, errors, mine)
        return cast(R, value)

    def _lead(self, stage: str, mine: _Outcome[T], lead: Callable[[list[T]], R]) -> tuple[list[Any], R | None] | None:
        """On rank 0: everybody's errors, and the result of ``lead`` when there are none."""
        everyone: list[Any] | None = [None] * self.world if self.leads else None
        if self.world > 1:
            self._exchange(stage, lambda: dist.gather_object(mine.portable(), everyone, dst=self._first, group=self.group))
        if everyone is None:
            return None
        everyone[0] = mine.portable()
        errors = [error for _, error in everyone]
        if any(errors):
            return errors, None
        led = _try(lambda: lead([value for value, _ in everyone]))
        if led.error is not None:
            mine.error, mine.original = led.error, led.original
            errors[0] = led.error
        return errors, led.value

    def _judge(self, stage: str, errors: list[ResilienceError | None], mine: _Outcome[Any]) -> None:
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        if isinstance(mine.original, (KeyboardInterrupt, SystemExit)):
            raise mine.original
        rank, error = failed[0]
        others = f" ({len(failed)} of {self.world} ranks failed)" if len(failed) > 1 else ""
        where = f"{stage} failed on rank {rank}{others}: " if self.world > 1 else f"{stage} failed: "
        raise type(error)(where + error.what, evidence=error.evidence, remedy=error.remedy) from mine.original

    def _exchange(self, stage: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise CheckpointError(
                f"{stage} failed: this rank ({self.rank} of {self.world}) lost contact with the others",
                evidence=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}",
                remedy="a rank died or is stuck; the attempt has to be relaunched",
            ) from error


def _try(work: Callable[[], T]) -> _Outcome[T]:
    """Run one rank's part.  Everything is caught, also what is no Exception: the others must hear of it before it goes on."""
    try:
        return _Outcome(value=work())
    except ResilienceError as error:
        return _Outcome(error=error, original=error)
    except BaseException as error:  # noqa: BLE001 - DCP's own failures derive from BaseException; _judge raises it again
        text = str(error).strip()
        return _Outcome(
            error=CheckpointError(f"{type(error).__name__}: {text}" if text else type(error).__name__), original=error
        )
