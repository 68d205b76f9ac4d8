"""What Slurm's environment variables say about this process, believed only as far as they deserve it.

After a requeue onto fewer nodes, Slurm up to 22.05 leaves the sizes of the first allocation in ``SLURM_NTASKS`` and
friends; so sizes are counted from the node list, and the rest must agree with it or is not believed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.nodeset import expand


@dataclass(frozen=True)
class SlurmEnvironment:
    """This process's place in Slurm.

    ``job_id`` is the form to give to every command: in an array ``ARRAY_TASK``, since the last task of an array has
    ``SLURM_JOB_ID == SLURM_ARRAY_JOB_ID``, and the plain number would then mean all of them.
    """

    job_id: str
    raw_job_id: str
    array_job_id: str | None
    array_task_id: str | None
    restart_count: int
    nodes: tuple[str, ...]
    node: str
    tasks_per_node: tuple[int, ...] | None
    step_id: str | None
    submit_dir: str
    job_name: str
    partition: str
    cluster: str
    end_at: float | None
    het_size: int

    @property
    def in_step(self) -> bool:
        """Started by srun, not the batch script itself."""
        return self.step_id is not None

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> SlurmEnvironment | None:
        """The environment of this process, or None outside of any job.  Raises :class:`SlurmError` for garbage."""
        raw = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
        if not raw:
            return None
        array, task = environment.get("SLURM_ARRAY_JOB_ID") or None, environment.get("SLURM_ARRAY_TASK_ID") or None
        step = environment.get("SLURM_STEP_ID") or None
        nodes = expand(environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or "")
        return cls(
            job_id=f"{array}_{task}" if array and task else raw,
            raw_job_id=raw,
            array_job_id=array,
            array_task_id=task,
            restart_count=_number(environment, "SLURM_RESTART_COUNT"),
            nodes=nodes,
            node=environment.get("SLURMD_NODENAME", ""),
            tasks_per_node=_believable_tasks(environment, nodes),
            step_id=step,
            submit_dir=environment.get("SLURM_SUBMIT_DIR", ""),
            job_name=environment.get("SLURM_JOB_NAME", ""),
            partition=environment.get("SLURM_JOB_PARTITION", ""),
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
            end_at=float(_number(environment, "SLURM_JOB_END_TIME")) or None,
            het_size=_number(environment, "SLURM_HET_SIZE"),
        )


_MOST_NODES = 1 << 20


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's ``4(x2),3`` as (4, 4, 3).  Raises :class:`SlurmError` for anything else."""
    out: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,18})\))?", piece.strip())
        if not found:
            raise SlurmError(f"{text[:80]!r} is not a list of tasks per node", evidence="expected something like 4(x2),3")
        nodes = int(found.group(2) or 1)
        if len(out) + nodes > _MOST_NODES:
            raise SlurmError(f"{text[:80]!r} is about more nodes than any cluster has", evidence=f"{_MOST_NODES} are the most")
        out += [int(found.group(1))] * nodes
    return tuple(out)


def _believable_tasks(environment: Mapping[str, str], nodes: tuple[str, ...]) -> tuple[int, ...] | None:
    """Tasks on each node, only if they are about as many nodes as there are now."""
    text = environment.get("SLURM_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE")
    if not text:
        return None
    try:
        counts = tasks_per_node(text)
    except SlurmError:
        return None
    if len(counts) == 1 and "SLURM_TASKS_PER_NODE" not in environment:
        counts *= len(nodes)
    return counts if nodes and len(counts) == len(nodes) else None


def _number(environment: Mapping[str, str], name: str) -> int:
    """A count; unset and empty are 0 (``SLURM_RESTART_COUNT`` is unset in the first run of a job up to 26.05)."""
    text = environment.get(name) or "0"
    try:
        return int(text)
    except ValueError as error:
        raise SlurmError(f"{name}={text!r} is not a number", evidence="it is in the environment of this process") from error


# Where the cluster is, and how to log in there: these must survive a scrub.
_KEEP = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"})
_FOREIGN = re.compile(r"(SLURM|SLURMD|SRUN|SALLOC|PMI|PMI2|PMIX|RESILIENCE|TORCHELASTIC|SUBMITIT)_")
_OF_A_RANK = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
                        "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
                        "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"})  # fmt: skip

# sbatch reads these, and they win over the #SBATCH lines of the script.  Source: sbatch(1), INPUT ENVIRONMENT VARIABLES;
# only those whose name is not simply SBATCH_ + the option's name.
_SBATCH_OPTION = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_NO_REQUEUE": "requeue",
    "SBATCH_NO_KILL": "no-kill",
}


def submission_environment(environment: Mapping[str, str] = os.environ, *, decided: Collection[str] = ()) -> dict[str, str]:
    """``environment`` without what would leak into a new job from the one we are in, or overrule what was asked for.

    Sizes, identities and process-manager variables of a surrounding job always go; ``SLURM_CONF`` stays.  ``SBATCH_*``
    variables win over the lines of a script, so those that speak about a ``decided`` option (sbatch's long names) go
    as well; inside a job all of them go, since they are leftovers there.  Elsewhere the rest are the user's own defaults.
    """
    inside = "SLURM_JOB_ID" in environment
    kept: dict[str, str] = {}
    for name, value in environment.items():
        if name in _KEEP:
            kept[name] = value
        elif _FOREIGN.match(name):
            continue
        elif name.startswith("SBATCH_"):
            option = _SBATCH_OPTION.get(name, name.removeprefix("SBATCH_").lower().replace("_", "-"))
            if not inside and option not in decided:
                kept[name] = value
        elif inside and name in _OF_A_RANK:
            continue
        else:
            kept[name] = value
    return kept
