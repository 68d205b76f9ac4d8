"""``submit_resilient``: one call from a function to a job that survives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.job import ResilientJob
from slurm_resilience.submit.local import start_local
from slurm_resilience.submit.parameters import settle
from slurm_resilience.submit.prepare import Work

OWN_NAMES = (
    "nodes",
    "ranks_per_node",
    "folder",
    "timeout_min",
    "partition",
    "config",
    "cluster",
    "kwargs",
    "name",
    "python",
    "wrap",
)
_CLUSTERS = ("slurm", "local")


def submit_resilient(
    job_fn: Callable[..., Any],
    *args: Any,
    nodes: int | str | tuple[int, int] | None = None,
    ranks_per_node: int | None = None,
    folder: str | os.PathLike[str] = "resilience-runs",
    timeout_min: float | None = None,
    partition: str | None = None,
    config: ResilienceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    cluster: str = "slurm",
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    python: str | None = None,
    wrap: str = "",
    **slurm: Any,
) -> ResilientJob[Any]:
    """Run ``job_fn(run, *args, **kwargs)`` on every rank of a job that outlives crashes, lost nodes and preemption.

    Everything is checked before anything is queued; a mistake is a :class:`ConfigError`, a refusal by Slurm a
    :class:`SubmitError`.  ``nodes`` is a number or (fewest, most).  The run gets a folder of its own in ``folder``, which all
    nodes must share.  ``config`` is a configuration, a mapping, or a YAML file; ``nodes`` and ``ranks_per_node`` win over it.
    ``python`` is the interpreter there (default: this one), ``wrap`` what is put before the ranks' command: a container, say.
    ``cluster="local"`` plays the nodes as processes of this machine.  All other parameters are sbatch's and submitit's, by
    their names: ``gpus_per_node=4, account="…", time="02:00:00", cpus_per_task=8`` (CPUs of one rank).
    """
    if not callable(job_fn):
        raise ConfigError(f"{job_fn!r} cannot be called", remedy="the first argument is a function: job_fn(run, *args)")
    if cluster not in _CLUSTERS:
        raise ConfigError(f"Unknown cluster {cluster!r}: {nearest(str(cluster), _CLUSTERS)}")
    settled = merge_config(config, nodes=nodes, ranks_per_node=ranks_per_node)
    wanted = {
        "job-name": name or getattr(job_fn, "__name__", "").strip("<>") or "resilient",
        **{key: value for key, value in (("timeout_min", timeout_min), ("partition", partition)) if value is not None},
        **slurm,
    }
    work = Work(function=job_fn, args=args, kwargs=dict(kwargs or {}), wrap=wrap)
    if cluster == "local":
        request = settle(wanted, settled, own_names=OWN_NAMES)
        return start_local(folder, str(request.options["job-name"]), work, settled, python=python, lead_s=request.lead_s)
    settle(wanted, settled, own_names=OWN_NAMES)  # mistakes first, before the folder is made
    executor = ResilientExecutor(folder, config=settled, python=python, own_names=OWN_NAMES)
    executor.update_parameters(**wanted)
    return executor.submit_work(work)


def merge_config(
    config: ResilienceConfig | Mapping[str, Any] | str | os.PathLike[str] | None, **explicit: Any
) -> ResilienceConfig:
    """One configuration; the explicit arguments that were given win.  Raises :class:`ConfigError`."""
    given = {key: value for key, value in explicit.items() if value is not None}
    if config is None or isinstance(config, (str, os.PathLike)):
        return ResilienceConfig.load(config, given)
    values = config.model_dump(exclude_unset=True) if isinstance(config, ResilienceConfig) else dict(config)
    merged = ResilienceConfig.load(None, values)  # dotted keys, as on the command line
    return ResilienceConfig.build({**merged.model_dump(exclude_unset=True), **given})
