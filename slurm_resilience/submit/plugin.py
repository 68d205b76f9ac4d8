"""What submitit's ``JobEnvironment()`` says inside of a rank of ours: the run's own numbers, not those of Slurm's step.

Slurm sees one task on each node, the agent; ranks know their place from the supervisor.  Registered as an entry point of
submitit, beside :class:`ResilientExecutor`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from submitit.core.job_environment import JobEnvironment


def make_known() -> None:
    """Have submitit find this environment in this process, also where the package's entry points are not installed."""
    from submitit.core import plugins

    known: Any = plugins.get_job_environments()  # the dict that it looks into each time
    known.setdefault(ResilientJobEnvironment.name(), ResilientJobEnvironment())


class ResilientJobEnvironment(JobEnvironment):
    """Active where ``SUBMITIT_EXECUTOR=resilient``, which a rank of a submitted function has."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "RESILIENCE_JOB_ID",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @classmethod
    def name(cls) -> str:
        return "resilient"

    @property
    def hostname(self) -> str:
        return os.environ.get("RESILIENCE_NODE") or super().hostname

    @property
    def hostnames(self) -> Sequence[str]:
        """The nodes of this attempt; the first one is where the ranks meet, under the attempt's own port."""
        from slurm_resilience.progress.contract import RankContract

        contract = RankContract.from_environment()
        nodes = list(contract.plan.get("nodes", ())) if contract is not None else []
        first = os.environ.get("MASTER_ADDR")
        return [first, *nodes[1:]] if first and nodes else nodes or [self.hostname]

    def _handle_signals(self, paths: Any, submission: Any) -> None:
        """Nothing: warnings reach the agent, and ranks by it."""

    def _requeue(self, countdown: int) -> None:
        """Nothing: the supervisor does that."""
