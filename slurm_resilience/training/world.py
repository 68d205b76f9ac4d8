"""Who are the other ranks, and over what do we speak with them?

Two gloo groups of our own, so that nothing of ours meets the trainer's collectives or the checkpoint writer's: one
for agreement, one for checkpoints.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.errors import LaunchError

AGREEMENT_TIMEOUT_S = 1800.0  # bounds the slowest rank's step or evaluation; a dead peer is an error at once
CHECKPOINT_TIMEOUT_S = 600.0  # bounds how much later one rank may finish writing than another


class World:
    """This rank's place among the others, known from the environment until the process group exists."""

    def __init__(self) -> None:
        self._control: dist.ProcessGroup | None = None
        self._checkpoint: dist.ProcessGroup | None = None
        self.waited_s = 0.0  # in collectives of ours between two steps

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group for agreement; None in a world of one."""
        return self._control

    @property
    def checkpoint(self) -> dist.ProcessGroup | None:
        """The group for the checkpoint's collectives; None in a world of one."""
        return self._checkpoint

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective of ours: the time is spent waiting for others, and is no work of this rank."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    @property
    def team(self) -> Team:
        """All ranks, for stages that they take together."""
        return Team(self._control)

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the other ranks (``env://``); nothing to do when the user did it already.

        A world of one, which a run may come down to, gets a group too, of itself: what wraps a model asks for one.
        All ranks must come.  Raises :class:`LaunchError` when the environment lacks what torch needs for it.
        """
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
            alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if self.size == 1 else {}  # type: ignore[attr-defined]
            if not alone:
                self._require_meeting_place()
            timeout = datetime.timedelta(seconds=timeout_s) if timeout_s else None
            dist.init_process_group(backend or ("nccl" if torch.cuda.is_available() else "gloo"), timeout=timeout, **alone)
        self.join()

    def _require_meeting_place(self) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise LaunchError(
                "The ranks cannot find each other",
                evidence=f"WORLD_SIZE is {self.size}, but {', '.join(missing)} is not in the environment",
                remedy="start the script by slurm-resilience run or torchrun, or unset WORLD_SIZE to train in one process",
            )

    def join(self) -> None:
        """Make our two groups, once, and the process group before them if nobody has.  All ranks must come."""
        if self._control is not None or self.size == 1:
            return
        if not dist.is_initialized():
            self.init_process_group()
            return
        self._control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=AGREEMENT_TIMEOUT_S))
        self._checkpoint = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=CHECKPOINT_TIMEOUT_S))

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank says, in the order of ranks.  All ranks must come."""
        if self._control is None:
            return [mine]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self._control)
        return everyone
