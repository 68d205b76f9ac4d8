"""How many ranks can each node hold, by what Slurm says about GPUs and tasks?

Slurm speaks of GPUs in many dialects: ``SLURM_GPUS_PER_NODE=a100:4``, ``Gres=gpu:a100:4(S:0-1),shard:8``,
``gres/gpu:h100=8``, ``SLURM_TRES_PER_TASK=cpu=8,gres/gpu=1``.  All are read here, and nothing else is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurm_resilience.errors import ConfigError

_GRES = re.compile(r"(?:gres[/:])?gpu(?:[:=]|$)")
_BARE = re.compile(r"(?:[A-Za-z_][\w.-]*:)?\d+")


def gpus_in(text: str, *, bare: bool = False) -> int | None:
    """GPUs in one of Slurm's texts; None when it does not speak of GPUs at all.

    ``bare``: the text is of a ``--gpus…`` option or its variable, where the word gpu is left out (``8``, ``a100:4``).

    A list of types is summed (``a100:2,v100:2`` is 4).  In a TRES list the total stands beside its parts
    (``gres/gpu=8,gres/gpu:a100=8``) and is not added to them.
    """
    typed, plain, seen = 0, 0, False
    for word in re.sub(r"\([^)]*\)", "", text).replace(" ", "").split(","):
        if _GRES.match(word):
            rest = _GRES.sub("", word, count=1)
        elif bare and _BARE.fullmatch(word):
            rest = word
        else:
            continue
        kind, _, count = re.sub("=", ":", rest).rpartition(":")
        if not count.isdigit():  # "gpu" and "gpu:a100" mean one
            kind, count = rest, "1"
        seen = True
        typed, plain = (typed + int(count), plain) if kind else (typed, plain + int(count))
    if not seen:
        return None
    return max(typed, plain) if "=" in text else typed + plain


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
    divided by those of a task (``SLURM_GPUS_PER_TASK``); a given ``ranks_per_node`` is the most that any node gets.  Raises
    :class:`ConfigError` when nothing is known, or when a task needs more GPUs than any node has.
    """
    known = environment or {}
    per_task = gpus_in(known.get("SLURM_GPUS_PER_TASK", ""), bare=True) or gpus_in(known.get("SLURM_TRES_PER_TASK", "")) or 1
    on_node = gpus_in(known.get("SLURM_GPUS_PER_NODE", ""), bare=True)
    if tasks is not None and len(tasks) != len(nodes):
        raise ConfigError(
            f"{len(tasks)} counts of tasks for {len(nodes)} nodes",
            evidence="Slurm may keep the counts of an earlier allocation in SLURM_TASKS_PER_NODE",
            remedy="leave the counts out: GPUs or ranks_per_node then decide",
        )
    out: dict[str, int] = {}
    for index, name in enumerate(nodes):
        found = (gpus or {}).get(name, on_node)
        if found is not None:
            slots = found // per_task
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
            evidence=f"SLURM_GPUS_PER_TASK is {per_task}; GPUs of the nodes: {dict(gpus or {}) or on_node}",
            remedy="ask for fewer GPUs per task, or for nodes with more",
        )
    return out
