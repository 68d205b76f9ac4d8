"""A real Slurm cluster on one machine, with faults on demand: slurmctld, slurmdbd and one isolated slurmd per node.

    from slurm_resilience.sandbox import Sandbox

    sandbox = Sandbox.up(nodes=4, name="mine", settings={"GraceTime": 5})
    job = sandbox.exec(["sbatch", "--parsable", "-N4", "job.sh"]).stdout.strip()
    sandbox.fault("power-off", "n3")
    sandbox.down()

Importing this package loads nothing else, since the init of every node starts through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Sandbox"]

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox


def __getattr__(name: str) -> Any:
    if name == "Sandbox":
        from slurm_resilience.sandbox.cluster import Sandbox

        return Sandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
