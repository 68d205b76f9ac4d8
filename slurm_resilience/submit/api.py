"""``submit_resilient``: one call from a function to a job that survives; ``map_resilient``: the same for many values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.submit.debug import run_here
from slurm_resilience.submit.executor import ResilientExecutor
from slurm_resilience.submit.job import ResilientJob
from slurm_resilience.submit.local import start_local
from slurm_resilience.submit.parameters import settle
from slurm_resilience.submit.prepare import Work, work_of

OWN_NAMES = (
    "nodes",
    "ranks_per_node",
    "spares",
    "folder",
    "timeout_min",
    "partition",
    "config",
    "cluster",
    "kwargs",
    "name",
    "python",
    "wrap",
    "with_run",
    "snapshot",
)
_CLUSTERS = ("slurm", "local", "debug")


def submit_resilient(
    job_fn: Callable[..., Any],
    *args: Any,
    nodes: int | str | tuple[int, int] | None = None,
    ranks_per_node: int | None = None,
    spares: int | None = None,
    folder: str | os.PathLike[str] = "resilience-runs",
    timeout_min: float | None = None,
    partition: str | None = None,
    config: ResilienceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    cluster: str = "slurm",
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    python: str | None = None,
    wrap: str = "",
    with_run: bool | None = None,
    snapshot: bool | str | os.PathLike[str] | None = None,
    **slurm: Any,
) -> ResilientJob[Any]:
    """Run ``job_fn(run, *args, **kwargs)`` on every rank of a job that outlives crashes, lost nodes and preemption.

    Everything is checked before anything is queued; a mistake is a :class:`ConfigError`, a refusal by Slurm a
    :class:`SubmitError`.  ``nodes`` is a number or (fewest, most).  The run gets a folder of its own in ``folder``, which all
    nodes must share.  ``config`` is a configuration, a mapping, or a YAML file; ``nodes``, ``ranks_per_node`` and ``spares``
    win over it.  ``python`` is the interpreter there (default: this one), ``wrap`` what is put before the ranks' command: a
    container, say.  ``cluster="local"`` plays the nodes as processes of this machine, ``"debug"`` calls the function here.
    A function whose signature has no room for ``run``, and submitit's Checkpointable, are called without it; ``with_run``
    decides where that cannot be seen.  ``snapshot=True`` copies the code of the current folder (a path: of that one), as git
    sees it, into the run's folder, so that every attempt on Slurm runs what the first one ran.  All other parameters are
    sbatch's and submitit's, by their names: ``gpus_per_node=4, account="…", time="02:00:00", cpus_per_task=8`` (CPUs of one
    rank), ``dependency=other_job``.
    """
    settled, wanted = _settled(
        job_fn, config, cluster, name, slurm, timeout_min=timeout_min, partition=partition,
        nodes=nodes, ranks_per_node=ranks_per_node, spares=spares,
    )  # fmt: skip
    work = work_of(job_fn, args, kwargs or {}, wrap=wrap, with_run=with_run)
    if cluster == "slurm":
        return _executor(folder, settled, python, wanted, snapshot).submit_work(work)
    return _elsewhere(cluster, work, settled, folder, python, wanted)


def map_resilient(
    job_fn: Callable[..., Any],
    *values: Iterable[Any],
    array_parallelism: int | None = None,
    nodes: int | str | tuple[int, int] | None = None,
    ranks_per_node: int | None = None,
    spares: int | None = None,
    folder: str | os.PathLike[str] = "resilience-runs",
    timeout_min: float | None = None,
    partition: str | None = None,
    config: ResilienceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    cluster: str = "slurm",
    name: str | None = None,
    python: str | None = None,
    wrap: str = "",
    with_run: bool | None = None,
    snapshot: bool | str | os.PathLike[str] | None = None,
    **slurm: Any,
) -> list[ResilientJob[Any]]:
    """:func:`submit_resilient` for each group of ``values``, as ``map()`` calls it: one Slurm array, one run for each task.

    Each task is preempted, requeued and resumed by itself.  At most ``array_parallelism`` run at a time.  The groups must be
    of the same length.  Elsewhere than on Slurm they run together ("local") or one after the other ("debug").
    """
    settled, wanted = _settled(
        job_fn, config, cluster, name, slurm, timeout_min=timeout_min, partition=partition,
        nodes=nodes, ranks_per_node=ranks_per_node, spares=spares,
    )  # fmt: skip
    columns = [list(column) for column in values]
    if not columns or len({len(column) for column in columns}) != 1 or not columns[0]:
        raise ConfigError(
            "map_resilient() needs one value of each kind for every task, and at least one task",
            evidence=f"it was given {[len(column) for column in columns]} values",
        )
    if array_parallelism is not None and array_parallelism < 1:
        raise ConfigError(f"array_parallelism={array_parallelism} would start no task at all")
    works = [work_of(job_fn, row, {}, wrap=wrap, with_run=with_run) for row in zip(*columns, strict=True)]
    if cluster == "slurm":
        return _executor(folder, settled, python, wanted, snapshot).submit_works(works, parallel=array_parallelism)
    return [_elsewhere(cluster, work, settled, folder, python, wanted) for work in works]


def _settled(
    job_fn: Callable[..., Any],
    config: ResilienceConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    cluster: str,
    name: str | None,
    slurm: Mapping[str, Any],
    *,
    timeout_min: float | None,
    partition: str | None,
    **explicit: Any,
) -> tuple[ResilienceConfig, dict[str, Any]]:
    """The configuration, and what is asked of Slurm; both checked, with nothing written yet."""
    if not callable(job_fn):
        raise ConfigError(f"{job_fn!r} cannot be called", remedy="the first argument is a function: job_fn(run, *args)")
    if cluster not in _CLUSTERS:
        raise ConfigError(f"Unknown cluster {cluster!r}: {nearest(str(cluster), _CLUSTERS)}")
    settled = merge_config(config, **explicit)
    wanted = {
        "job-name": name or getattr(job_fn, "__name__", type(job_fn).__name__).strip("<>") or "resilient",
        **{key: value for key, value in (("timeout_min", timeout_min), ("partition", partition)) if value is not None},
        **slurm,
    }
    settle(wanted, settled, own_names=OWN_NAMES)
    return settled, wanted


def _executor(
    folder: str | os.PathLike[str],
    config: ResilienceConfig,
    python: str | None,
    wanted: Mapping[str, Any],
    snapshot: bool | str | os.PathLike[str] | None,
) -> ResilientExecutor:
    executor = ResilientExecutor(folder, config=config, python=python, own_names=OWN_NAMES, snapshot=snapshot)
    executor.update_parameters(**wanted)
    return executor


def _elsewhere(
    cluster: str,
    work: Work,
    config: ResilienceConfig,
    folder: str | os.PathLike[str],
    python: str | None,
    wanted: Mapping[str, Any],
) -> ResilientJob[Any]:
    request = settle(wanted, config, own_names=OWN_NAMES)
    name = str(request.options["job-name"])
    if cluster == "debug":
        return run_here(folder, name, work, config)
    return start_local(folder, name, work, config, python=python, lead_s=request.lead_s)


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
