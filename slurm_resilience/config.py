"""What a user may ask for: one typed configuration, from YAML, keyword arguments or the command line.

Unknown keys are errors that name the nearest valid one; a value that makes no sense is refused with the reason.
Later sources win over earlier ones: file, then command line or keyword arguments.  The environment never wins
over an explicit argument.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slurm_resilience.errors import ConfigError, nearest


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class CheckpointConfig(_Section):
    """When checkpoints are taken, where they go and how many stay."""

    every_steps: int | None = Field(default=None, ge=1, description="save after every so many steps")
    every_min: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        default=10.0,
        description="save after so many minutes since the last save; auto: from what a save costs and how often this run fails",
    )
    auto_bounds_min: tuple[float, float] = Field(default=(0.5, 60.0), description="least and most minutes that auto may choose")
    keep_last: int = Field(default=3, ge=1, description="committed checkpoints to keep besides pinned ones")
    keep_every_steps: int | None = Field(default=None, ge=1, description="also keep the first of every so many steps, for ever")
    keep_every_hours: float | None = Field(
        default=None, gt=0, description="also keep the first of every so many hours, for ever"
    )
    keep_best: str | None = Field(default=None, min_length=1, description="also keep the best by this metric of run.report()")
    keep_best_is: Literal["lowest", "highest"] = Field(default="lowest", description="which value of keep_best is best")
    dir: str | None = Field(default=None, description="checkpoint root; default: RUN_DIR/checkpoints")
    background: bool = Field(
        default=True,
        description="write behind training: it waits for a copy in memory, not for the disk; without room for one, it waits",
    )
    local_every_steps: int | None = Field(
        default=None, ge=1, description="copy into each node's own memory after so many steps, for ranks that die on live nodes"
    )
    local_dir: str | None = Field(default=None, description="where those copies go; default: a folder of the run in /dev/shm")
    trusted_group: str | int | None = Field(
        default=None, description="group whose members' checkpoints are loaded as if they were ours"
    )

    @model_validator(mode="after")
    def _says_something(self) -> CheckpointConfig:
        low, high = self.auto_bounds_min
        if not 0 < low <= high:
            raise ValueError(f"auto_bounds_min={self.auto_bounds_min}: give the least and the most minutes, such as (0.5, 60)")
        if self.local_dir is not None and self.local_every_steps is None:
            raise ValueError("local_dir without local_every_steps would do nothing")
        if self.keep_best is None and self.keep_best_is != "lowest":
            raise ValueError(f"keep_best_is={self.keep_best_is} without keep_best would do nothing")
        return self


class VerifyConfig(_Section):
    """How far a restored run may be from the one that was saved; docs/explanation/verification.md has the reasons at length."""

    probe_same_world: float = Field(
        default=1e-6, ge=0, description="probe loss, same ranks: the same kernels on the same numbers, but for memory alignment"
    )
    probe_other_world: float = Field(
        default=1e-4, ge=0, description="probe loss, other ranks: sums over shards are taken in another order"
    )
    probe_low_precision: float = Field(
        default=2e-2, ge=0, description="the same where modules answer in 16 bits: one rounding of bfloat16 is 0.4 %"
    )
    first_steps: int = Field(
        default=10, ge=0, description="steps after a resume that are compared with what went before; 0: none"
    )
    window: int = Field(default=64, ge=1, description="steps before the resume that make the median and its deviation")
    least_history: int = Field(default=16, ge=1, description="with fewer steps than this, median and deviation say nothing")
    in_a_row: int = Field(
        default=3, ge=1, description="steps too high in a row that condemn: a spike is one, a wrong state stays"
    )
    loss_factor: float = Field(default=8.0, gt=0, description="loss: deviations above the median that are too high")
    loss_floor: float = Field(default=0.02, ge=0, description="loss: least deviation, as a part of the median")
    grad_norm_factor: float = Field(
        default=20.0, gt=0, description="gradient norm: deviations above the median that are too high; its tails are heavy"
    )
    grad_norm_floor: float = Field(default=0.25, ge=0, description="gradient norm: least deviation, as a part of the median")
    replay: float = Field(
        default=1e-3, ge=0, description="loss of a step taken again against its log; atomics on GPUs make 1e-5 to 1e-4"
    )
    most_rollbacks: int = Field(default=2, ge=0, description="times that first steps may send a run back without progress")
    next_batch: bool = Field(
        default=True,
        description="where run.recompute_with() says how: compare the next step's loss with the log before it is taken",
    )
    recompute_every_steps: int | None = Field(
        default=None, ge=1, description="every so many steps ranks check each other's work on one micro-batch; names nodes"
    )
    most_entries: int = Field(
        default=8, ge=1, description="checkpoints that one resume may refuse before it gives up: more are no accident"
    )
    most_s: float = Field(default=1800.0, gt=0, description="longest search for one to trust; the entry being tried may end")
    start_fresh: bool = Field(
        default=False, description="begin again at step 0 when no checkpoint can be trusted, instead of an error"
    )


class LimitsConfig(_Section):
    """How long silence may last before it counts as a failure, in seconds."""

    agent_silence_s: float = Field(default=2.5, gt=0, description="an agent that hears nothing kills its ranks")
    node_silence_s: float = Field(default=4.0, gt=0, description="a node that says nothing counts as lost")
    handshake_s: float = Field(default=120.0, gt=0, description="longest wait for agents at the start of an allocation")
    check_s: float = Field(default=20.0, gt=0, description="longest check of the nodes (node_check)")
    stop_grace_s: float = Field(default=60.0, gt=0, description="longest wait for ranks to save and end on a warning")
    takeover_s: float = Field(
        default=4.5,
        ge=0,
        description="a supervisor that shows no sign is replaced by an agent of a surviving node; 0: never; default: "
        "node_silence_s + 0.5",
    )
    orphan_s: float = Field(default=60.0, gt=0, description="an agent without any supervisor ends itself")
    init_s: float = Field(
        default=600.0, gt=0, description="longest silence of a rank before its first steps, and in a section not seen yet"
    )
    step_s: float | None = Field(
        default=None, gt=0, description="longest silence between steps; default: learned from the steps seen, 300 s before that"
    )
    learn: bool = Field(
        default=True, description="take limits from what was seen; else init_s and step_s (300 s) hold throughout"
    )
    factor: float = Field(default=5.0, ge=1.5, description="a learned limit is so many times the longest silence seen")
    floor_s: float = Field(default=8.0, gt=0, description="a learned limit between steps is never below this")
    section_floor_s: float = Field(
        default=120.0, gt=0, description="nor that of anything else (checkpoints, evaluations, …): file systems have bad days"
    )
    quiet_s: float = Field(
        default=900.0, gt=0, description="a rank without a Run, or past its end, is quiet after so long without CPU and I/O"
    )
    kill_quiet: bool = Field(
        default=True, description="when all ranks are quiet, that is a hang (past their end: the end); else an event"
    )

    @model_validator(mode="before")
    @classmethod
    def _follows(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "takeover_s" not in values:
            silence = values.get("node_silence_s", cls.model_fields["node_silence_s"].default)
            if isinstance(silence, int | float):
                return {**values, "takeover_s": silence + 0.5}
        return values

    @model_validator(mode="after")
    def _ordered(self) -> LimitsConfig:
        if self.agent_silence_s + 1.0 > self.node_silence_s:
            raise ValueError(
                f"agent_silence_s ({self.agent_silence_s}) must stay at least 1 s under node_silence_s "
                f"({self.node_silence_s}): otherwise a cut-off node still trains when its ranks are replaced"
            )
        if 0 < self.takeover_s < self.node_silence_s:
            raise ValueError(
                f"takeover_s ({self.takeover_s}) must not be under node_silence_s ({self.node_silence_s}): a supervisor "
                "that is merely cut off stops its own ranks after that time only"
            )
        return self


class BudgetConfig(_Section):
    """How often each cause may strike without progress (a newer committed checkpoint refills it)."""

    rank_crash: int = Field(default=3, ge=0)
    hang: int = Field(default=3, ge=0)
    node_lost: int = Field(default=10, ge=0)
    launch_failed: int = Field(default=3, ge=0)
    bad_checkpoint: int = Field(default=0, ge=0)
    oom: int = Field(default=2, ge=0)


class NotifyConfig(_Section):
    """Whom to tell outside of Slurm, and of what.  The message is JSON: on the command's stdin, or posted."""

    events: tuple[str, ...] = Field(
        default=("fault_detected", "recovered", "requeue_failed", "checkpoint_quarantined", "run_failed", "run_completed"),
        description="events to tell of, by their names in docs/reference/events.md, and recovered: training goes on",
    )
    command: str | None = Field(default=None, description="command to run, without a shell; it must not hold a secret")
    webhook_file: str | None = Field(
        default=None,
        description="file of mode 0600: the URL to post to, then header lines; so no secret is in a command line",
    )
    every_s: float = Field(default=60.0, ge=0, description="at most one message of each event in so many seconds")
    timeout_s: float = Field(default=10.0, gt=0, le=300, description="longest time for one try; the run does not wait for it")

    @field_validator("events", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return tuple(name for name in re.split(r"[,\s]+", value) if name) if isinstance(value, str) else value


class ObserveConfig(_Section):
    """What the supervisor tells others while it runs.  All of it is off by default, and none of it can fail a run."""

    log_format: Literal["text", "json"] = Field(
        default="text", description="lines of the supervisor's log and of the job's output"
    )
    metrics_file: str | None = Field(
        default=None, description="textfile for node-exporter's collector, on the batch host; its name ends in .prom"
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="serve Prometheus metrics at this port of the batch host; 0: any that is free"
    )
    metrics_host: str = Field(
        default="127.0.0.1", min_length=1, description="address of the interface to serve them on; there is no password"
    )
    notify: NotifyConfig = NotifyConfig()

    @property
    def active(self) -> bool:
        """Something besides the log was asked for."""
        return self.metrics_port is not None or any((self.metrics_file, self.notify.command, self.notify.webhook_file))


_CONSTRAINT = re.compile(r"(?:any|in|out|(?:<=|>=|/)?[1-9]\d*)(?:,(?:any|in|out|(?:<=|>=|/)?[1-9]\d*))*")


class MeshConfig(_Section):
    """What each axis of the device mesh may be; everything is data parallel where nothing is said.

    A number fixes the axis; texts are ``<=8``, ``>=2``, ``/32`` (divides 32), ``in`` and ``out`` (of a node), joined by commas.
    """

    pp: int | str | None = Field(default=None, description="pipeline stages")
    dp_replicate: int | str | None = Field(default=None, description="replicas of the sharded model (HSDP, DDP)")
    dp_shard: int | str | None = Field(default=None, description="ranks over which parameters are sharded (FSDP)")
    cp: int | str | None = Field(default=None, description="context parallel")
    tp: int | str | None = Field(default=None, description="tensor parallel; stays inside a node unless 'out'")
    ep: int | str | None = Field(default=None, description="expert parallel; divides dp_shard x cp")

    @field_validator("*", mode="before")
    @classmethod
    def _constraint(cls, value: Any) -> Any:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, str) and not _CONSTRAINT.fullmatch(value.replace(" ", "")):
            raise ValueError(f"{value!r} is no constraint of a mesh axis: use 4, any, <=8, >=2, /32, in, out, with commas")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is no degree of a mesh axis: 1 switches an axis off")
        return value

    @property
    def model_ranks(self) -> int:
        """Ranks that are sure to share their samples: the product of pp, cp and tp where they are fixed."""
        return math.prod(axis for axis in (self.pp, self.cp, self.tp) if isinstance(axis, int))


class ResilienceConfig(_Section):
    """Everything that decides how a run is kept alive.  Frozen into RUN_DIR/run.json at submission."""

    nodes: tuple[int, int] = Field(default=(1, 1), description="fewest and most nodes to train on")
    ranks_per_node: int = Field(default=1, ge=1, description="ranks on each node, usually its GPUs")
    global_batch: int | None = Field(default=None, ge=1, description="samples per optimizer step, whatever the world size")
    micro_batch: int | None = Field(default=None, ge=1, description="samples per forward pass on one rank")
    keep_accumulation: Literal["linear", "sqrt", "none"] | None = Field(
        default=None,
        description="let the batch follow the world, global_batch being that of the most nodes, and scale the learning rate so",
    )
    preload: tuple[str, ...] = Field(default=("torch",), description="modules that the warm launcher imports")
    warm: bool = Field(default=True, description="fork ranks from a process that has imported the preloads")
    spares: int = Field(default=0, ge=0, description="nodes on top of the most, kept idle and warm for lost ones")
    requeue: bool = Field(default=True, description="ask Slurm for a new allocation when this one ends early")
    on_drain: Literal["checkpoint_and_move", "warn", "ignore"] = Field(
        default="checkpoint_and_move",
        description="when somebody drains a node under the job: save and go on without it, or not",
    )
    node_check: Literal["auto", "always", "off"] = Field(
        default="auto", description="check the nodes before an attempt: after two faults that may be theirs, each time, never"
    )
    seed: int = Field(default=0, description="seed of the sample order and of RNGs on a changed world")
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    verify: VerifyConfig = VerifyConfig()
    limits: LimitsConfig = LimitsConfig()
    budgets: BudgetConfig = BudgetConfig()
    observe: ObserveConfig = ObserveConfig()

    @field_validator("nodes", mode="before")
    @classmethod
    def _node_range(cls, value: Any) -> Any:
        if isinstance(value, int):
            return (value, value)
        if isinstance(value, str):
            low, dash, high = value.partition("-")
            if low.strip().isdigit() and (not dash or high.strip().isdigit()):
                return (int(low), int(high if dash else low))
        return value

    @field_validator("preload", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return tuple(name for name in re.split(r"[,\s]+", value) if name) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sensible(self) -> ResilienceConfig:
        low, high = self.nodes
        if low < 1:
            raise ValueError(f"nodes={self.nodes}: at least one node is needed")
        if low > high:
            raise ValueError(f"nodes={self.nodes}: the minimum is above the maximum; did you mean ({high}, {low})?")
        if self.keep_accumulation is not None and self.global_batch is None:
            raise ValueError(f"keep_accumulation={self.keep_accumulation} without global_batch would do nothing")
        if self.global_batch is not None:
            most = max(1, high * self.ranks_per_node // self.mesh.model_ranks)
            if self.global_batch < most:
                raise ValueError(
                    f"global_batch={self.global_batch} cannot be divided over {most} ranks "
                    f"({high} nodes x {self.ranks_per_node}): some would have no sample at all"
                )
            if self.micro_batch is not None and self.micro_batch > self.global_batch:
                raise ValueError(f"micro_batch={self.micro_batch} is more than the whole global_batch={self.global_batch}")
        return self

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> ResilienceConfig:
        """A configuration from plain values.  Raises :class:`ConfigError` with one sentence per problem."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(
                "The configuration makes no sense: " + "; ".join(_sentence(cls, problem) for problem in error.errors()),
                evidence="it was checked before anything was started or queued",
                remedy="correct the values named above; docs/reference/config.md lists all keys",
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | None = None) -> ResilienceConfig:
        """A YAML file (or none) with overrides (nested mappings, or dotted keys such as ``checkpoint.every_steps``)."""
        values = {} if path is None else _read_yaml(path)
        for key, value in (overrides or {}).items():
            _put(values, key.split("."), value)
        return cls.build(values)


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file.  A key that stands there twice is refused: YAML itself would drop the first one."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the configuration {path}", evidence=str(error)) from error
    try:
        loaded = yaml.load(text, Loader)  # noqa: S506, a SafeLoader
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a key that is itself a list or mapping
        raise ConfigError(f"{path} is not YAML that we can use", evidence=str(error).replace("\n", " ")) from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values", evidence=f"it holds a {type(loaded).__name__}")
    return loaded or {}


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{name!r} is not a section", evidence=f"its value is {child!r}")
        values = child
    if isinstance(value, Mapping) and isinstance(values.get(last), dict):
        for key, inner in value.items():
            _put(values[last], [key], inner)
    else:
        values[last] = dict(value) if isinstance(value, Mapping) else value


def _sentence(root: type[BaseModel], problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        section: Any = root
        for part in problem["loc"][:-1]:
            section = section.model_fields[str(part)].annotation
        return f"unknown key {where!r}: {nearest(str(problem['loc'][-1]), section.model_fields)}"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {text}" if where else text
