"""Hydra's sweeps as resilient jobs: ``python train.py -m hydra/launcher=resilient lr=1e-3,1e-4``.

One line in the script, before ``@hydra.main``: ``import slurm_resilience.submit.hydra``.  What the launcher is told
(``hydra.launcher.nodes=2-4``) are the arguments of :func:`slurm_resilience.map_resilient`, Slurm's own among them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from slurm_resilience.submit.api import map_resilient
from slurm_resilience.submit.job import JobFailed

if TYPE_CHECKING:
    from slurm_resilience.training import Run

log = logging.getLogger(__name__)


class ResilientLauncher(Launcher):
    """Each set of overrides is one run, with a folder of its own, in one Slurm array."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = {name: value for name, value in arguments.items() if value is not None}
        self._task: _Task | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._task = _Task(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit, wait for all, and give back what each task returned.  Raises, after all have ended, the first failure."""
        assert self._task is not None
        sweep = Path(self._task.config.hydra.sweep.dir).absolute()
        sweep.mkdir(parents=True, exist_ok=True)
        defaults = {"folder": sweep / ".resilient", "name": self._task.config.hydra.job.name}
        arguments = {**defaults, **self._arguments, "with_run": True}
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        for number, overrides in zip(numbers, job_overrides, strict=True):
            log.info("#%d: %s", number, " ".join(filter_overrides(overrides)))
        state = Singleton.get_state()
        tasks = [list(overrides) for overrides in job_overrides]
        jobs = map_resilient(self._task, tasks, numbers, [state] * len(tasks), **arguments)
        for number, job in zip(numbers, jobs, strict=True):
            log.info("#%d: job %s, its run is in %s", number, job.job_id, job.run_dir)
        done: list[JobReturn] = []
        failed: list[JobFailed] = []
        for number, job in zip(numbers, jobs, strict=True):
            try:
                done.append(job.result())
                log.info("#%d: complete, it returned %r", number, done[-1].return_value)
            except JobFailed as error:  # the others train on, and what they return is worth having
                failed.append(error)
                log.error("#%d: failed, its run is in %s: %s", number, job.run_dir, error)
        if failed:
            log.error("%d of %d failed", len(failed), len(jobs))
            raise failed[0]
        return done


@dataclass
class _Task:
    """What travels to the nodes."""

    context: HydraContext
    function: TaskFunction
    config: DictConfig

    def __call__(self, run: Run, overrides: list[str], number: int, state: Any) -> JobReturn:
        """One task, in every rank of its run: Hydra is put up there as it was where it was submitted.

        The task's own function finds ``run`` as ``Run.current()``.
        """
        Singleton.set_state(state)
        setup_globals()
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config.hydra.job) as job:
            job["id"], job["num"] = f"{config.hydra.job.name}_{number}", number
        done = run_job(
            hydra_context=self.context,
            task_function=self.function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        _ = done.return_value  # raises what the task raised: Hydra only notes it, and the run would count as finished
        return done


def register() -> None:
    """Make ``hydra/launcher=resilient`` known; importing this module does it."""
    # Hydra takes plugins from its own namespace package alone, and finds them there by name
    plugins = Plugins.instance()  # looks for installed ones first
    try:
        home = importlib.import_module("hydra_plugins")
    except ImportError:  # there is none
        home = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        home.__path__ = []
    ResilientLauncher.__module__ = "hydra_plugins.slurm_resilience"
    home.slurm_resilience = sys.modules[ResilientLauncher.__module__] = sys.modules[__name__]  # type: ignore[attr-defined]
    plugins.register(ResilientLauncher)
    known = [name for name, one in inspect.signature(map_resilient).parameters.items() if one.kind is one.KEYWORD_ONLY]
    node: dict[str, Any] = {name: None for name in known if name != "with_run"}
    target = f"{ResilientLauncher.__module__}.{ResilientLauncher.__qualname__}"
    node |= {"_target_": target, "cluster": "slurm", "config": {}}
    ConfigStore.instance().store(
        group="hydra/launcher", name="resilient", node=OmegaConf.create(node), provider="slurm-resilience"
    )


register()
