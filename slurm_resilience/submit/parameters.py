"""Which of Slurm's parameters were asked for, and do they make sense?  Checked before anything is written or queued.

All of sbatch's options and submitit's parameters go by their own names.  Those that decide how the run is kept alive
are ours; asking for one of them is an error that says what to use instead.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.slurm.mark import with_word

if TYPE_CHECKING:
    from slurm_resilience.config import ResilienceConfig

# sbatch's long options.  Source: `sbatch --help` of 22.05.8, and those added up to 25.11 according to its man page.
_SBATCH_WORDS = """
    account acctg-freq bb bbf begin chdir cluster-constraint clusters comment constraint consolidate-segments container
    container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gres gres-flags hint hold input job-name kill-on-invalid-dep licenses
    mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice nodefile nodelist
    oom-kill-step overcommit oversubscribe partition power prefer priority profile propagate qos reboot reservation
    resv-ports segment sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task uid use-min-nodes wait-all-nodes wckey
"""
_SHORT = {
    "account": "A", "begin": "b", "chdir": "D", "clusters": "M", "constraint": "C", "core-spec": "S", "cpus-per-task": "c",
    "dependency": "d", "distribution": "m", "exclude": "x", "gpus": "G", "hold": "H", "input": "i", "job-name": "J",
    "licenses": "L", "nodelist": "w", "partition": "p", "qos": "q", "time": "t",
}  # fmt: skip
# Long name → short one, "" where there is none.
SBATCH_OPTIONS: dict[str, str] = {word: _SHORT.get(word, "") for word in _SBATCH_WORDS.split()}
# Those that stand alone, or may.
SBATCH_FLAGS = frozenset({"contiguous", "exclusive", "get-user-env", "hold", "oom-kill-step", "overcommit", "oversubscribe",
                          "propagate", "reboot", "spread-job", "stepmgr", "use-min-nodes", "nice", "resv-ports"})  # fmt: skip
# Other words for the same: submitit's, and sbatch's own old ones.
_ALIASES = {"name": "job-name", "timeout-min": "time", "mem-gb": "mem", "num-gpus": "gpus-per-node", "workdir": "chdir"}
# Not sbatch's: what goes around the command in the script, and how early Slurm warns.
_OURS = frozenset({"setup", "teardown", "signal_delay_s", "additional_parameters"})
# sbatch's and submitit's own that would undo what is done here, and what to take instead, from Python and on the command line.
REFUSED = {
    "ntasks": "the number of ranks follows from the nodes at hand; give ranks_per_node (--ranks-per-node)",
    "ntasks-per-node": "give ranks_per_node (--ranks-per-node); with ntasks Slurm would never give more than the fewest nodes",
    "tasks-per-node": "give ranks_per_node (--ranks-per-node)",
    "ntasks-per-core": "give ranks_per_node (--ranks-per-node)",
    "ntasks-per-socket": "give ranks_per_node (--ranks-per-node)",
    "ntasks-per-gpu": "give ranks_per_node (--ranks-per-node)",
    "gpus-per-task": "it needs a fixed number of tasks; give gpus_per_node (--gpus-per-node)",
    "array": "call map_resilient(function, values) in Python: each task is a run of its own",
    "array-parallelism": "it belongs to map_resilient(function, values)",
    "requeue": "it is always set; config={'requeue': False} (--set requeue=false) keeps a run from being requeued",
    "no-requeue": "config={'requeue': False} (--set requeue=false) keeps a run from being requeued",
    "no-kill": "it is always set, so that a job outlives a lost node",
    "signal": "give signal_delay_s (--signal-delay-s), the seconds of warning before the time limit",
    "open-mode": "it is always append, or a requeue would wipe the log",
    "output": "the log is in the run's folder; job.stdout() and `slurm-resilience logs` read it",
    "error": "the log is in the run's folder; job.stderr() and `slurm-resilience logs` read it",
    "stderr-to-stdout": "both are in one log already",
    "use-srun": "the supervisor starts its own agents",
    "srun-args": "the supervisor starts its own agents",
    "wrap": "the script is ours; give a command or a function",
    "parsable": "the job id is read for you",
    "test-only": "use dry_run (--dry-run)",
    "wait": "call job.wait()",
}
_DEFAULT_LEAD_S = 90


@dataclass(frozen=True)
class SlurmRequest:
    """What will stand in the script: ``options`` by sbatch's long names, in submitit's manner (True is a bare flag)."""

    options: dict[str, Any]
    lead_s: int
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    time_limit_min: int | None = field(default=None)


def settle(slurm: Mapping[str, Any], config: ResilienceConfig, *, own_names: Sequence[str] = ()) -> SlurmRequest:
    """Turn keyword arguments into sbatch's options.  Raises :class:`ConfigError` with one paragraph for the first mistake.

    ``own_names``: further parameters of the caller, for the hint after a typo.
    """
    from slurm_resilience.runtime.planner import check_fit  # late, with the configuration's own imports

    check_fit(config)
    wanted = _canonical(slurm, own_names)
    lead = wanted.pop("signal_delay_s", None)
    setup, teardown = (_lines(name, wanted.pop(name, None)) for name in ("setup", "teardown"))
    limit = time_limit_min(wanted.pop("time")) if "time" in wanted else None
    if "dependency" in wanted:
        wanted["dependency"] = _dependency(wanted["dependency"])
    if "mem" in wanted:
        wanted["mem"] = _mem(wanted["mem"])
    _spread_cpus(wanted, config.ranks_per_node)
    fewest, most = config.nodes
    most += config.spares
    options: dict[str, Any] = {
        **{name: _value(value) for name, value in wanted.items() if value is not None and value is not False},
        "nodes": f"{fewest}-{most}" if fewest != most else str(fewest),
        "no-kill": True,
        ("requeue" if config.requeue else "no-requeue"): True,
        "open-mode": "append",
    }
    # so that `watch`, or the admin's expediter, knows the job for one of ours
    options["comment"] = with_word(str(options.get("comment", "")))
    if limit is not None:
        options["time"] = limit
    lead_s = _lead(lead, limit if isinstance(limit, int) else None)
    options["signal"] = f"USR2@{lead_s}"
    return SlurmRequest(options, lead_s, setup, teardown, limit if isinstance(limit, int) else None)


def time_limit_min(value: Any) -> int | str:
    """A time limit in whole minutes, rounded up as Slurm does; "UNLIMITED" stays.

    Takes minutes as a number, a timedelta, and Slurm's own texts: ``30``, ``30:00``, ``00:30:00``, ``1-12``, ``1-12:30``.
    """
    if isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value * 60.0
    elif isinstance(value, str) and value.strip().upper() in ("UNLIMITED", "INFINITE"):
        return "UNLIMITED"
    else:
        parsed = _slurm_seconds(value)
        if parsed is None:
            raise ConfigError(
                f"time={value!r} is not a time limit",
                evidence="expected minutes, a timedelta, or Slurm's m:s, h:m:s, days-h, days-h:m, days-h:m:s",
            )
        seconds = parsed
    if seconds <= 0:
        raise ConfigError(f"time={value!r} leaves the job no time at all")
    return -int(-seconds // 60)


def _slurm_seconds(value: Any) -> float | None:
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    days, first, second, third = (int(part) if part else None for part in found.groups())
    if days is not None:
        return days * 86400.0 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600.0 + (second or 0) * 60 + third
    return (first or 0) * 60.0 + (second or 0)


def _canonical(slurm: Mapping[str, Any], own_names: Sequence[str]) -> dict[str, Any]:
    """The parameters by sbatch's names, each known, none twice."""
    given = dict(slurm)
    extra = given.pop("additional_parameters", None) or {}
    if not isinstance(extra, Mapping):
        raise ConfigError("additional_parameters must be a mapping of sbatch's options", evidence=f"it is {extra!r}")
    out: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in [*given.items(), *extra.items()]:
        if key in ("setup", "teardown", "signal_delay_s"):
            out[key] = value
            continue
        word = str(key).replace("_", "-").removeprefix("--").removeprefix("slurm-")
        name = _ALIASES.get(word, word)
        if name in REFUSED:
            raise ConfigError(f"{key}={value!r} cannot be chosen here: {REFUSED[name]}")
        if name not in SBATCH_OPTIONS:
            raise ConfigError(_unknown(str(key), own_names), evidence="neither sbatch nor submitit has such a parameter")
        if value is None:
            continue
        if name == "mem" and word == "mem-gb":
            value = f"{float(value) * 1024:.0f}M"
        if name in out and _comparable(name, out[name]) != _comparable(name, value):
            raise ConfigError(f"{origin[name]} and {key} are the same parameter, with different values")
        out[name], origin[name] = value, str(key)
    return out


def _comparable(name: str, value: Any) -> Any:
    return time_limit_min(value) if name == "time" else value


def _unknown(key: str, own_names: Sequence[str]) -> str:
    from slurm_resilience.config import ResilienceConfig  # late: it costs a tenth of a second, and --help needs none of it

    if key in ResilienceConfig.model_fields:
        return f"Unknown parameter {key!r}: it belongs into the configuration, config={{{key!r}: …}}"
    valid = {*SBATCH_OPTIONS, *_ALIASES, *(name.replace("_", "-") for name in (*_OURS, *own_names))}
    names = sorted(name.replace("-", "_") for name in valid)
    return f"Unknown parameter {key!r}: {nearest(key.replace('-', '_'), names)}"


def _spread_cpus(wanted: dict[str, Any], ranks_per_node: int) -> None:
    """``cpus_per_task`` means a rank; Slurm sees one task on each node, the agent, which needs the CPUs of all its ranks.

    Where nothing is said about CPUs each rank gets one, as sbatch would give it.
    """
    if "cpus-per-task" in wanted:
        try:
            wanted["cpus-per-task"] = int(wanted["cpus-per-task"]) * ranks_per_node
        except (TypeError, ValueError):
            raise ConfigError(f"cpus_per_task={wanted['cpus-per-task']!r} is not a number of CPUs") from None
    elif ranks_per_node > 1 and not {"exclusive", "mincpus", "cpus-per-gpu"} & wanted.keys():
        wanted["cpus-per-task"] = ranks_per_node


def _dependency(value: Any) -> str:
    """sbatch's own text, or jobs (objects or ids) that have to end well first."""
    jobs = list(value) if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(job, str) and not job.isdigit() for job in jobs):
        return ",".join(jobs)
    ids = [str(getattr(job, "job_id", job)) for job in jobs]
    bad = [name for name in ids if not re.fullmatch(r"\d+(_\d+|\+\d+)?", name)]
    if bad:
        raise ConfigError(
            f"dependency={value!r} is no list of jobs",
            evidence=f"{bad[0]!r} is no job of Slurm",
            remedy="give jobs, job ids, or sbatch's own text such as 'afterany:4711'",
        )
    return "afterok:" + ":".join(ids)


def _mem(value: Any) -> str:
    """submitit takes gigabytes as a number, sbatch a text with a unit."""
    if isinstance(value, (int, float)):
        return f"{int(value)}G" if value == int(value) else f"{value * 1024:.0f}M"
    return str(value)


def _value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    text = value if value is True else str(value)
    if isinstance(text, str) and re.search(r"[\n\r\0]", text):
        raise ConfigError(f"{value!r} cannot stand in a script", evidence="it holds a line break")
    return text


def _lines(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not all(isinstance(line, str) for line in value):
        raise ConfigError(f"{name} must be a list of shell lines", evidence=f"it is {value!r}")
    return tuple(value)


def _lead(asked: Any, limit_min: int | None) -> int:
    """Seconds of warning before the time limit; Slurm may give it up to a minute earlier, never later."""
    limit_s = limit_min * 60 if limit_min is not None else None
    if asked is None:
        return _DEFAULT_LEAD_S if limit_s is None else min(_DEFAULT_LEAD_S, limit_s // 2)
    if not isinstance(asked, (int, float)) or isinstance(asked, bool) or asked < 1:
        raise ConfigError(f"signal_delay_s={asked!r} is not a number of seconds")
    if asked > 65535:
        raise ConfigError(f"signal_delay_s={asked!r} is more than Slurm allows", evidence="sbatch(1): at most 65535 seconds")
    if limit_s is not None and asked >= limit_s:
        raise ConfigError(
            f"The warning (signal_delay_s={asked:g}) would come before the job has begun",
            evidence=f"the time limit is {limit_s} s",
            remedy="raise the time limit, or lower signal_delay_s",
        )
    return int(asked)
