"""The templates by name, and a batch script made from one of them with values filled in.  Jinja2 is loaded late."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.submit.script import body, fill


@dataclass(frozen=True)
class Template:
    """One template: what it is for, the first line of what it makes, and values that differ from the common ones.

    ``keys`` are those that only it has, with their defaults.
    """

    says: str
    headline: str
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


_TRAIN = "python examples/gpt/train.py --steps 100"
_COMMON: dict[str, tuple[str, str]] = {
    "job_name": ("resilient", "the job's name"),
    "time": ("01:00:00", "time limit, as sbatch takes it"),
    "gpus_per_node": ("", "GPUs of each node; there are as many ranks"),
    "ranks_per_node": ("", "ranks on each node, where that is not the number of GPUs"),
    "cpus_per_node": ("", "CPUs of each node, for all its ranks together"),
    "mem": ("", "memory of each node, as sbatch takes it"),
    "exclusive": ("", "yes: whole nodes"),
    "partition": ("", "partition"),
    "account": ("", "account"),
    "qos": ("", "quality of service"),
    "lead_s": ("90", "seconds of warning before the time limit"),
    "setup": ("", "a line of shell before all else: module load cuda"),
    "resilience": ("slurm-resilience", "how slurm-resilience is called on the nodes"),
    "options": ("", "further options of `slurm-resilience run`: --global-batch 48"),
    "command": (_TRAIN, "what is started on every rank"),
}
_NODES = {"nodes": "1-4"}
TEMPLATES: dict[str, Template] = {
    "single-node": Template("one node, all its GPUs", "Trains on one node through crashes, preemption and time limits, "
                            "with slurm-resilience."),
    "multi-node": Template("DDP or FSDP on several nodes, fewer when one is lost", "Trains on several nodes through crashes, "
                           "lost nodes, preemption and time limits, with slurm-resilience.", _NODES, {"exclusive": "yes"}),
    "torchrun": Template("a script for torchrun, unchanged, with one checkpoint file of its own", "Runs a script as torchrun "
                         "does, unchanged, through crashes, lost nodes, preemption and time limits.",
                         {**_NODES, "checkpoint_file": "snapshot.pt", "resume_with": ""},
                         {"exclusive": "yes", "command": "python examples/plain_ddp.py --snapshot {checkpoint}"}),
    "array": Template("an array: each task is a run of its own", "Runs one training for each task of an array, each through "
                      "crashes, preemption and time limits.", {"array": "1-4%2"}, {"command": f"{_TRAIN} --seed"}),
    "container": Template("ranks inside a container, supervisor and agents outside", "Trains inside a container, through "
                          "crashes, lost nodes, preemption and time limits.",
                          {**_NODES, "image": "training.sif", "container": "apptainer exec --nv"}, {"exclusive": "yes"}),
}  # fmt: skip
_KEYS_HELP = {
    "nodes": "FEWEST-MOST nodes",
    "checkpoint_file": "name of the script's own checkpoint file",
    "resume_with": "arguments for the script when there is one to go on from: --resume {checkpoint}",
    "array": "the tasks, and after % how many at a time",
    "image": "the container's image",
    "container": "what runs a command in a container; the image follows, or stands for {image}",
}
_NUMBERS = ("gpus_per_node", "ranks_per_node", "cpus_per_node", "lead_s")
_WORD_LISTS = ("resilience", "options", "command", "container")


def values_of(name: str) -> dict[str, tuple[str, str]]:
    """The keys of a template, each with its default and what it is.  Raises :class:`ConfigError` for a name that is none."""
    template = _template(name)
    own = {key: (default, _KEYS_HELP[key]) for key, default in template.keys.items()}
    common = {key: (template.defaults.get(key, default), says) for key, (default, says) in _COMMON.items()}
    return {**own, **common}


def render(name: str, values: Mapping[str, str] | None = None) -> str:
    """The batch script.  Raises :class:`ConfigError` for an unknown template or key, and for values that cannot stand there."""
    known = values_of(name)
    for key in values or {}:
        if key not in known:
            raise ConfigError(f"The template {name} has no {key!r}: {nearest(key, known)}")
    chosen = {key: str((values or {}).get(key, default)).strip() for key, (default, _) in known.items()}
    for key, value in chosen.items():
        _check(key, value)
    context: dict[str, Any] = {key: _split(key, value) if key in _WORD_LISTS else value for key, value in chosen.items()}
    context |= {"name": name, "file": f"{name}.sbatch", "headline": _template(name).headline, "body": body()}
    context |= {"setup": [chosen["setup"]] if chosen["setup"] else [], "directive": _directive}
    return fill(name, context)


def _template(name: str) -> Template:
    if name not in TEMPLATES:
        raise ConfigError(
            f"There is no template {name!r}: {nearest(name, TEMPLATES)}", remedy="slurm-resilience templates list"
        )
    return TEMPLATES[name]


def _check(key: str, value: str) -> None:
    wrong = ""
    if re.search(r"[\n\r\0]", value):
        wrong = "it holds a line break"
    elif key in _NUMBERS and value and not (value.isascii() and value.isdigit() and int(value) > 0):
        wrong = "a number of at least 1 is needed"
    elif key == "exclusive" and value not in ("", "yes", "no"):
        wrong = "it is yes or no"
    elif key == "nodes" and not _is_range(value):
        wrong = "N or FEWEST-MOST is needed"
    elif key == "time":
        from slurm_resilience.submit.parameters import time_limit_min

        time_limit_min(value)
    elif key in ("command", "resilience", "container", "array", "image", "checkpoint_file", "job_name") and not value:
        wrong = "it must not be empty"
    elif key in ("job_name", "partition", "account", "qos", "mem", "array") and re.search(r"\s", value):
        wrong = "sbatch would take what follows the space for something else"
    if wrong:
        raise ConfigError(f"{key}={value!r} cannot stand in a batch script", evidence=wrong)


def _is_range(value: str) -> bool:
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", value)
    return found is not None and int(found[1]) <= int(found[2] or found[1])


def _split(key: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value!r} cannot be split into words", evidence=str(error)) from None


def _directive(option: str, value: str, example: object) -> str:
    """The line for sbatch, or an example of it that sbatch does not read."""
    return f"#SBATCH --{option}={value}" if value else f"##SBATCH --{option}={example}"
