"""Which configuration holds for this rank: what the script says, then what the run was submitted with, then the defaults.

An explicit argument of the script wins over the run's configuration, except where the supervisor has planned with the
latter: a batch that differs from the plan is an error, because the plan's arithmetic would be about another experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.training.verifying import Verifying

_KEYS = ("seed", "global_batch", "micro_batch", "checkpoint", "verify")
_CHECKPOINT_KEYS = (
    "every_steps", "every_min", "auto_bounds_min", "keep_last", "keep_every_steps", "keep_every_hours", "keep_best",
    "keep_best_is", "dir", "background", "local_every_steps", "local_dir", "trusted_group",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The part of the configuration that ranks act on."""

    seed: int = 0
    global_batch: int | None = None
    micro_batch: int | None = None
    keep_accumulation: str | None = None
    every_steps: int | None = None
    every_min: float | Literal["auto"] | None = 10.0
    auto_bounds_min: tuple[float, float] = (0.5, 60.0)
    retention: Retention = field(default_factory=Retention)
    checkpoint_dir: str | None = None
    verify: Verifying = field(default_factory=Verifying)
    background: bool = True
    local_every_steps: int | None = None
    local_dir: str | None = None
    trusted_group: str | int | None = None


def settle(script: Mapping[str, Any], submitted: Mapping[str, Any] | None) -> Settings:
    """The settings from both sources.  Raises :class:`ConfigError` for unknown keys, nonsense, another batch than planned."""
    mine = {key: value for key, value in script.items() if value is not None}
    _known(mine, _KEYS, "Run()")
    checkpoint = mine.get("checkpoint", {})
    if not isinstance(checkpoint, Mapping):
        raise ConfigError("checkpoint= of Run() must be a mapping", evidence=f"it is {checkpoint!r}")
    _known(checkpoint, _CHECKPOINT_KEYS, "checkpoint= of Run()")
    if mine:
        from slurm_resilience.config import ResilienceConfig

        ResilienceConfig.build(mine)
    planned = dict(submitted or {})
    for key in ("global_batch", "micro_batch"):
        if mine.get(key) and planned.get(key) and mine[key] != planned[key]:
            raise ConfigError(
                f"The script wants {key}={mine[key]}, the run was submitted with {key}={planned[key]}",
                evidence="the supervisor's plan, and the checkpoints of this run, stand on the latter",
                remedy=f"say it in one place only: leave {key} out of the script, or give `slurm-resilience run` or `submit` "
                f"--{key.replace('_', '-')} {mine[key]} (in Python: {key}={mine[key]} in config= of submit_resilient)",
            )
    joined = {**planned, **mine}
    cadence = {**dict(planned.get("checkpoint") or {}), **checkpoint}
    default = Settings()
    return Settings(
        seed=int(joined.get("seed") or 0),
        global_batch=joined.get("global_batch"),
        micro_batch=joined.get("micro_batch"),
        keep_accumulation=planned.get("keep_accumulation"),
        every_steps=cadence.get("every_steps"),
        every_min=cadence.get("every_min", default.every_min),
        auto_bounds_min=tuple(cadence.get("auto_bounds_min", default.auto_bounds_min)),
        retention=Retention(
            keep_last=cadence.get("keep_last", default.retention.keep_last),
            every_steps=cadence.get("keep_every_steps"),
            every_hours=cadence.get("keep_every_hours"),
            best=cadence.get("keep_best"),
            best_is=cadence.get("keep_best_is", default.retention.best_is),
        ),
        checkpoint_dir=cadence.get("dir"),
        verify=Verifying.of({**dict(planned.get("verify") or {}), **dict(mine.get("verify") or {})}),
        background=cadence.get("background", default.background),
        local_every_steps=cadence.get("local_every_steps"),
        local_dir=cadence.get("local_dir"),
        trusted_group=cadence.get("trusted_group"),
    )


def _known(values: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in valid:
            raise ConfigError(f"{where} does not know {key!r}", evidence=nearest(key, valid))
