"""How many ranks can each node hold, by what Slurm says about GPUs and tasks?  Nothing is guessed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurm_resilience.errors import ConfigError
from slurm_resilience.slurm.environment import tasks_per_node
from slurm_resilience.slurm.gpus import gpus_in

_COUNTS = re.compile(r"(?=.*[,(])\d+(?:\(x\d+\))?(?:,\d+(?:\(x\d+\))?)*", re.ASCII)


def slots_per_node(
    nodes: Sequence[str],
    *,
    ranks_per_node: int | None = None,
    gpus: Mapping[str, int] | None = None,
    tasks: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Ranks that each of ``nodes`` can hold, from the most specific thing that is known.

    In this order: ``gpus`` counted on each node (what its agent found, or its record says), ``SLURM_GPUS_PER_NODE`` of
    ``environment``, ``tasks`` (Slurm's tasks per node, already checked against the node list), ``ranks_per_node``.  GPUs are
    divided by those of a task (``SLURM_GPUS_PER_TASK``) or shared by its tasks (``SLURM_NTASKS_PER_GPU``); a given
    ``ranks_per_node`` is the most that any node gets.  Raises :class:`ConfigError` when nothing is known, or when a task needs
    more GPUs than any node has.
    """
    known = environment or {}
    per_task = gpus_in(known.get("SLURM_GPUS_PER_TASK", ""), bare=True) or gpus_in(known.get("SLURM_TRES_PER_TASK", "")) or 1
    sharing = known.get("SLURM_NTASKS_PER_GPU", "")
    per_gpu = max(1, int(sharing)) if sharing.isdecimal() and len(sharing) < 10 else 1
    asked = _asked(known.get("SLURM_GPUS_PER_NODE", ""), len(nodes))
    if tasks is not None and len(tasks) != len(nodes):
        raise ConfigError(
            f"{len(tasks)} counts of tasks for {len(nodes)} nodes",
            evidence="Slurm may keep the counts of an earlier allocation in SLURM_TASKS_PER_NODE",
            remedy="leave the counts out: GPUs or ranks_per_node then decide",
        )
    out: dict[str, int] = {}
    for index, name in enumerate(nodes):
        found = (gpus or {}).get(name, asked[index])
        if found is not None:
            slots = found * per_gpu // per_task
        elif tasks is not None:
            slots = tasks[index]
        elif ranks_per_node is not None:
            slots = ranks_per_node
        else:
            raise ConfigError(
                f"Nobody can tell how many ranks node {name} can hold",
                evidence="neither its GPUs nor SLURM_GPUS_PER_NODE, SLURM_TASKS_PER_NODE or ranks_per_node is known",
                remedy="give ranks_per_node",
            )
        out[name] = slots if ranks_per_node is None else min(slots, ranks_per_node)
    if out and not any(out.values()) and per_task > 1:
        raise ConfigError(
            f"A task needs {per_task} GPUs, and no node has as many",
            evidence=f"SLURM_GPUS_PER_TASK is {per_task}; GPUs of the nodes: {dict(gpus or {}) or asked}",
            remedy="ask for fewer GPUs per task, or for nodes with more",
        )
    return out


def _asked(text: str, nodes: int) -> Sequence[int | None]:
    """GPUs of each node by one number for all, or by a list such as ``4(x2),3``, which is not ours unless it is as long."""
    if _COUNTS.fullmatch(text):
        counts = tasks_per_node(text)
        return counts if len(counts) == nodes else [None] * nodes
    return [gpus_in(text, bare=True)] * nodes
