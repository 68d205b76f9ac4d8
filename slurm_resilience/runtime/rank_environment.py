"""The environment of one rank: what torch expects, what a Run expects, and the user's own on top of the agent's."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_resilience.progress.contract import RankContract
from slurm_resilience.runtime.messages import Launch


def rank_environment(
    base: Mapping[str, str], launch: Launch, *, rank: int, local_rank: int, contract: RankContract
) -> dict[str, str]:
    """All variables of a rank.

    The names are those of torchrun, so that ``init_process_group()`` and the frameworks that look for torchrun work unchanged.
    ``OMP_NUM_THREADS`` is kept where it is set, and 1 otherwise, as with torchrun; ``CUDA_VISIBLE_DEVICES`` is not touched.
    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, torch/distributed/rendezvous.py.
    """
    env = dict(base)
    for name, value in launch.env.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = str(value)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(launch.world),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(len(launch.ranks)),
        GROUP_RANK=str(launch.group_rank),
        GROUP_WORLD_SIZE=str(launch.groups),
        ROLE_NAME="default",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(launch.world),
        MASTER_ADDR=launch.master_addr,
        MASTER_PORT=str(launch.master_port),
        TORCHELASTIC_RUN_ID=contract.run_id,
        TORCHELASTIC_RESTART_COUNT=str(launch.attempt),
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE=str(launch.store_hosted),
    )
    env.update(contract.to_environment())
    return env
