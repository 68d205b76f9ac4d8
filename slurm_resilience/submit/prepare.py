"""Everything of a run that must be there before it is queued: its folder, identity, configuration, call and script."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import write_atomic
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.submit.payload import CallFolder
from slurm_resilience.submit.script import Settings, render


@dataclass(frozen=True)
class Work:
    """What the ranks do: a command, or ``function(run, *args, **kwargs)`` in the interpreter ``python``."""

    command: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrap: str = ""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be queued: ``script`` is written, and ``command`` is what every rank will run."""

    run_dir: Path
    run_id: str
    script: Path


def settings_of(
    run_dir: Path,
    work: Work,
    *,
    python: str,
    lead_s: int,
    more_options: Sequence[str] = (),
    setup: Sequence[str] = (),
    teardown: Sequence[str] = (),
) -> Settings:
    """The settings block of the script.  Pure: a dry run shows it without a file being written."""
    options = ["--config", str(run_dir / "config.yaml"), *more_options]
    if work.wrap:
        options += ["--wrap", work.wrap]
    return Settings(
        run_dir=str(run_dir),
        resilience=(python, "-m", "slurm_resilience"),
        options=options,
        command=command_of(run_dir, work, python),
        lead_s=lead_s,
        setup=setup,
        teardown=teardown,
    )


def command_of(run_dir: Path, work: Work, python: str) -> tuple[str, ...]:
    """What is started on every rank."""
    if work.function is None:
        return work.command
    return (python, "-u", "-m", "slurm_resilience.submit.call", str(run_dir / "call"))


def prepare(run_dir: Path, work: Work, config: ResilienceConfig, *, header: str, settings: Settings) -> Prepared:
    """Write it all, the script last.  Raises :class:`ConfigError` for what cannot be written or pickled."""
    folder = RunFolder(run_dir)
    folder.prepare()
    call = CallFolder(run_dir / "call")
    if work.function is not None:
        call.write(work.function, work.args, work.kwargs)
    else:
        call.path.mkdir(mode=0o700, exist_ok=True)
    write_atomic(run_dir / "config.yaml", to_yaml(config))
    run_id = folder.open_run(
        argv=list(settings.command), config=config.model_dump(mode="json"), wrap=tuple(shlex.split(work.wrap))
    )
    script = call.path / "submission.sh"
    write_atomic(script, os.fsencode(render(header, settings)), mode=0o700)
    return Prepared(run_dir, run_id, script)


def to_yaml(config: ResilienceConfig) -> str:
    """The whole configuration, so that a later release's defaults change nothing for this run."""
    import yaml

    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text
