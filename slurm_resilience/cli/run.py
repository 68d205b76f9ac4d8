"""Keep a training command alive inside this Slurm job: start it on every node, and again after every fault.

Call it once, from the batch script:

    slurm-resilience run --nodes 2-4 --global-batch 48 -- python train.py --lr 3e-4

The exit code says how it ended (0: complete, 75: requeued, others: docs/reference/exit-codes.md).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from typing import Any

from slurm_resilience.cli import checkpoint_file
from slurm_resilience.errors import ConfigError

_UNITS_MIN = {"s": 1 / 60, "m": 1.0, "h": 60.0}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--run-dir", metavar="DIR", help="the run's folder, shared by all nodes (default: RESILIENCE_RUN_DIR, "
                                         "else ./resilience-runs/job-ID)")  # fmt: skip
    add("--config", metavar="FILE", help="configuration in YAML; the options below win over it")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration, e.g. limits.step_s=60")
    add("--nodes", metavar="MIN[-MAX]", help="nodes to train on (default: 1 to all of the allocation)")
    add("--spares", type=int, metavar="K", help="nodes of the allocation on top of these, kept idle and warm (default: 0)")
    add("--ranks-per-node", type=int, metavar="K", help="ranks on each node, usually its GPUs (default: 1)")
    add("--global-batch", type=int, metavar="B", help="samples per optimizer step, whatever the number of nodes")
    add("--micro-batch", type=int, metavar="M", help="samples per forward pass on one rank")
    add("--checkpoint-every", metavar="STEPS|TIME", help="100 (steps), 90s, 30m, 2h or auto (default: 10m)")
    add("--preload", metavar="MOD,…", help="modules that warm launchers import (default: torch)")
    add("--wrap", metavar="CMD", help="put before the command on every node, e.g. 'apptainer exec --nv img.sif'")
    add("--local", type=int, metavar="N", help="no Slurm: N pretend nodes on this machine")
    add("--cold", action="store_true", help="start ranks by exec, without warm launchers")
    add("--log-format", choices=("text", "json"), help="lines of the supervisor's log (default: text)")
    add("--metrics-port", type=int, metavar="PORT", help="serve Prometheus metrics here, on the loopback interface unless "
                                                         "observe.metrics_host says another; 0: any port")  # fmt: skip
    checkpoint_file.configure(parser)
    add("argv", nargs="+", metavar="CMD", help="the command and its arguments, after --")


def execute(args: argparse.Namespace) -> int:
    """Supervise, and say on stdout what happens."""
    from slurm_resilience.runtime.processes import set_name
    from slurm_resilience.runtime.start import Wish, check_command, supervise

    set_name("sr-supervisor")

    def show(line: str) -> None:
        print(line, flush=True)

    if args.local is not None and args.local < 1:
        raise ConfigError(
            f"--local {args.local} makes no sense: it needs 1 or more",
            evidence="it is the number of nodes that this machine plays",
            remedy="give --local 1, or leave it out inside a Slurm job",
        )
    check_command(args.argv, wrapped=bool(args.wrap))
    wish = Wish(
        argv=tuple(checkpoint_file.command_of(args)),
        run_dir=args.run_dir,
        config_file=args.config,
        values=overrides(args),
        wrap=tuple(shlex.split(args.wrap or "")),
        local=args.local or 0,
    )
    try:
        return supervise(wish, show=show)
    finally:
        _let_go_of_stdout()


def _let_go_of_stdout() -> None:
    """What cannot be shown any more must not change the exit code: neither here nor in the interpreter's own last flush."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Configuration keys from the command line; an option of its own wins over --set."""
    values: dict[str, Any] = {}
    for pair in args.set:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} is not KEY=VALUE", remedy="write it like --set limits.step_s=60")
        values[key.strip()] = _value(text)
    for key in ("nodes", "spares", "ranks_per_node", "global_batch", "micro_batch"):
        given = getattr(args, key)
        if given is not None:
            values[key] = given
    for key in ("log_format", "metrics_port"):
        given = getattr(args, key, None)
        if given is not None:
            values[f"observe.{key}"] = given
    if args.preload is not None:
        values["preload"] = tuple(name for name in re.split(r"[,\s]+", args.preload) if name)
    if args.cold:
        values["warm"] = False
    if args.checkpoint_every is not None:
        values.update(_every(args.checkpoint_every))
    return values


def _value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _every(text: str) -> dict[str, Any]:
    if text.strip() == "auto":
        return {"checkpoint.every_min": "auto"}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found or (not found[2] and not found[1].isdigit()):
        raise ConfigError(
            f"--checkpoint-every {text!r} is neither a number of steps nor a time", remedy="write 100, 90s, 30m, 2h or auto"
        )
    if not found[2]:
        return {"checkpoint.every_steps": int(found[1]), "checkpoint.every_min": None}
    return {"checkpoint.every_min": float(found[1]) * _UNITS_MIN[found[2]]}
