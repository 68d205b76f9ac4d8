"""From the nodes that are left to the same experiment: allocation, mesh, batch, sample order.  Pure arithmetic.

``plan_attempt`` is the supervisor's entry; ``plan_batch`` and ``SampleOrder`` are the training loop's.
"""

from slurm_resilience.elastic.allocation import Allocation, Node, allocate
from slurm_resilience.elastic.attempt import plan_attempt
from slurm_resilience.elastic.axes import AXES, Axis, MeshConstraints
from slurm_resilience.elastic.batch import BatchPlan, MicroBatch, loss_scale, plan_batch
from slurm_resilience.elastic.mesh import MeshPlan, plan_mesh
from slurm_resilience.elastic.order import GlobalBatch, Position, SampleOrder

__all__ = [
    "AXES",
    "Allocation",
    "Axis",
    "BatchPlan",
    "GlobalBatch",
    "MeshConstraints",
    "MeshPlan",
    "MicroBatch",
    "Node",
    "Position",
    "SampleOrder",
    "allocate",
    "loss_scale",
    "plan_attempt",
    "plan_batch",
    "plan_mesh",
]
