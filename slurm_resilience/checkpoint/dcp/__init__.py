"""[torch] Sharded, verified checkpoints of state dicts, on top of torch.distributed.checkpoint's planners and file format."""

from slurm_resilience.checkpoint.dcp.load import LoadResult, load, load_latest
from slurm_resilience.checkpoint.dcp.save import save

__all__ = ["LoadResult", "load", "load_latest", "save"]
