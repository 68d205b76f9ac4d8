"""[torch] Sharded, verified checkpoints of state dicts, on top of torch.distributed.checkpoint's planners and file format."""

from slurm_resilience.checkpoint.dcp.loading import LoadResult, load, load_latest
from slurm_resilience.checkpoint.dcp.saving import save

__all__ = ["LoadResult", "load", "load_latest", "save"]
