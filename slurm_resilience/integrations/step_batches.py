"""Which samples does a framework's loader give this rank?  Those of each step, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slurm_resilience.training.data import Batches


class StepBatches:
    """A ``batch_sampler`` for ``torch.utils.data.DataLoader``: one micro-batch after the other, without end.

    It begins at the step where the run stands when it is asked, so a loader that is made anew after a restart goes on where
    training does, also in the middle of an epoch; what workers had fetched ahead is not lost.
    """

    def __init__(self, batches: Batches, standing: Callable[[], int]) -> None:
        self._batches = batches
        self._standing = standing

    def __iter__(self) -> Iterator[list[int]]:
        for _, _, micro in self._batches.ahead(self._standing()):
            yield list(micro.indices)
