"""How many GPUs does a job have on each node, in all the dialects in which Slurm speaks of them?

``SLURM_GPUS_PER_NODE=a100:4``, ``Gres=gpu:a100:4(S:0-1),shard:8``, ``gres/gpu:h100=8``, ``GRES=gpu:4(IDX:0-3)``.  What cannot
be read is not guessed: None is "nobody could tell", and never zero.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.nodeset import expand

_GRES = re.compile(r"(?:gres[/:])?gpu(?:[:=]|$)")
_BARE = re.compile(r"(?:[A-Za-z_][\w.-]*:)?[0-9]+")
# Source: slurm_sprint_job_info() of 22.05 to 25.05: one such group for the nodes that share their numbers.
_ON_NODES = re.compile(r"(?<!\S)Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_MOST_DIGITS = 9
_REQUESTS = re.compile(r"SLURM_(?:GPUS|GPUS_PER_(?:NODE|TASK|SOCKET)|NTASKS_PER_GPU|TRES_PER_TASK|STEP_GRES|GRES|GPU_FREQ)")


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
        if not count.isdecimal():  # "gpu" and "gpu:a100" mean one
            kind, count = rest, "1"
        if len(count) > _MOST_DIGITS:
            continue
        seen = True
        typed, plain = (typed + int(count), plain) if kind else (typed, plain + int(count))
    if not seen:
        return None
    return max(typed, plain) if "=" in text else typed + plain


def gpus_on_nodes(text: str) -> dict[str, int]:
    """GPUs that a job holds on each of its nodes, from ``scontrol -d -o show job``; empty for a job that has none.

    A node of a job with GPUs that has none itself is 0.
    """
    found: dict[str, int | None] = {}
    for nodes, gres in _ON_NODES.findall(text):
        try:
            found.update(dict.fromkeys(expand(nodes), gpus_in(gres)))
        except SlurmError:  # no node list: words of the user's that look like one
            continue
    return {name: count or 0 for name, count in found.items()} if any(found.values()) else {}


def gpu_request(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables in which Slurm repeats what a job has asked for of GPUs."""
    return {name: value for name, value in environment.items() if _REQUESTS.fullmatch(name) and value}
