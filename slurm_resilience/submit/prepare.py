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
from slurm_resilience.submit.classic import wants_run
from slurm_resilience.submit.payload import CallFolder
from slurm_resilience.submit.script import Settings, Shell, render


@dataclass(frozen=True)
class Work:
    """What the ranks do: a command, or ``function(run, *args, **kwargs)`` in the interpreter ``python``."""

    command: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrap: str = ""
    with_run: bool = True


def work_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    wrap: str = "",
    with_run: bool | None = None,
) -> Work:
    """The work of calling a function; whether it gets a ``Run`` is seen from its signature unless ``with_run`` says it."""
    wants = wants_run(function, args, kwargs) if with_run is None else with_run
    return Work(function=function, args=tuple(args), kwargs=dict(kwargs), wrap=wrap, with_run=wants)


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be queued: ``script`` is written, and ``command`` is what every rank will run."""

    run_dir: Path
    run_id: str
    script: Path


def settings_of(
    run_dir: Path | Shell,
    work: Work,
    *,
    python: str,
    lead_s: int,
    more_options: Sequence[str] = (),
    setup: Sequence[str] = (),
    teardown: Sequence[str] = (),
) -> Settings:
    """The settings block of the script.  Pure: a dry run shows it without a file being written.

    ``run_dir`` is a word for the shell where each task of an array has its own.
    """
    options = ["--config", _inside(run_dir, "config.yaml"), *more_options]
    if work.wrap:
        options += ["--wrap", work.wrap]
    return Settings(
        run_dir=run_dir if isinstance(run_dir, Shell) else str(run_dir),
        resilience=(python, "-m", "slurm_resilience"),
        options=options,
        command=command_of(run_dir, work, python),
        lead_s=lead_s,
        setup=setup,
        teardown=teardown,
    )


def command_of(run_dir: Path | Shell, work: Work, python: str) -> tuple[str, ...]:
    """What is started on every rank."""
    if work.function is None:
        return work.command
    return (python, "-u", "-m", "slurm_resilience.submit.call", _inside(run_dir, "call"))


def _inside(run_dir: Path | Shell, name: str) -> str:
    return Shell(f'"$run_dir"/{name}') if isinstance(run_dir, Shell) else str(run_dir / name)


def prepare(run_dir: Path, work: Work, config: ResilienceConfig, *, header: str, settings: Settings) -> Prepared:
    """Write it all, the script last.  Raises :class:`ConfigError` for what cannot be written or pickled."""
    run_id = fill(run_dir, work, config, command=settings.command)
    script = run_dir / "call" / "submission.sh"
    write_script(script, header, settings)
    return Prepared(run_dir, run_id, script)


def write_script(path: Path, header: str, settings: Settings) -> None:
    """Put the script there, whole, for its owner to run."""
    write_atomic(path, os.fsencode(render(header, settings)), mode=0o700)


def fill(run_dir: Path, work: Work, config: ResilienceConfig, *, command: Sequence[str]) -> str:
    """The run's folder with everything in it but a script; returns the run id."""
    folder = RunFolder(run_dir)
    folder.prepare()
    call = CallFolder(run_dir / "call")
    if work.function is not None:
        call.write(work.function, work.args, work.kwargs, with_run=work.with_run)
    else:
        call.path.mkdir(mode=0o700, exist_ok=True)
    write_atomic(run_dir / "config.yaml", to_yaml(config))
    return folder.open_run(argv=list(command), config=config.model_dump(mode="json"), wrap=tuple(shlex.split(work.wrap)))


def to_yaml(config: ResilienceConfig) -> str:
    """The whole configuration, so that a later release's defaults change nothing for this run."""
    import yaml

    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


def chosen(config: ResilienceConfig) -> dict[str, Any]:
    """What of the configuration is not the default, by dotted keys."""
    defaults = _flat(ResilienceConfig().model_dump(mode="json"))
    return {key: value for key, value in _flat(config.model_dump(mode="json")).items() if value != defaults.get(key)}


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) and value else {f"{before}{key}": value}
    return out
