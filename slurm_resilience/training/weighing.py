"""How much does a loss count, and what do all ranks say together?"""

from __future__ import annotations

import torch

from slurm_resilience.elastic.batch import LossOf
from slurm_resilience.training import data
from slurm_resilience.training.identity import Identity


class Weighing(Identity):
    """The side of a ``Run`` that weighs: one loss in the step's mean, one number in the sum of all ranks."""

    _batches: dict[str, data.Source]

    def scale_loss(
        self,
        loss: data.Loss,
        micro: data.Micro,
        *,
        reduction: LossOf = "mean",
        tokens: int | torch.Tensor | None = None,
        total_tokens: int | float | None = None,
    ) -> data.Loss:
        """The loss to call ``backward`` on, so that the step's gradient is that of the mean over the whole global batch.

        ``reduction`` says what ``loss`` is over the micro-batch: its mean or its sum.  With ``tokens`` of this micro-batch and
        ``total_tokens`` of the step (:meth:`total_tokens`) the mean is over tokens and no longer over samples.
        """
        return data.scale_loss(loss, micro, reduction=reduction, tokens=tokens, total_tokens=total_tokens)

    def total_tokens(self, mine: int | torch.Tensor) -> int:
        """The step's tokens over all ranks, of this rank's number without fillers.  All ranks must come, before ``backward``.

        Ranks that share their samples (tensor, pipeline, context parallel) are counted once: those that the plan's mesh puts
        together, or that were told so by ``dp_ranks`` when the samples (``name="train"``, or the first) were asked for.
        """
        source = self._batches.get("train") or next(iter(self._batches.values()), None)
        ranks = self.dp_ranks if source is None else source.plan.dp_ranks
        return round(self.sum(mine) * ranks / self.world_size)

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum of one number over all ranks.  All ranks must come.

        Ranks that share their samples (tensor, pipeline, context parallel) count each: a mean loss is then
        ``run.sum(total) * run.dp_ranks / run.world_size``.
        """
        number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        if self._world.control is None:
            return number
        tensor = torch.tensor(number, dtype=torch.float64)
        with self._world.waiting():
            torch.distributed.all_reduce(tensor, group=self._world.control)
        return float(tensor)
