"""Submit a training command to Slurm, so that it lives through crashes, lost nodes, preemption and time limits.

    slurm-resilience submit --nodes 2-4 --ranks-per-node 4 --gpus-per-node 4 --time 12:00:00 -- python train.py --lr 3e-4

Besides the options below, sbatch's long options are taken as they are; the few that would undo what is done here say so.
What is queued is the shipped template with these settings; --dry-run shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from slurm_resilience.cli import checkpoint_file
from slurm_resilience.errors import ConfigError, ExitCode

_OWN = ("folder", "run-dir", "config", "set", "nodes", "spares", "ranks-per-node", "global-batch", "micro-batch",
        "checkpoint-every", "preload", "wrap", "cold", "python", "signal-delay-s", "dry-run", "wait", "json", "checkpoint-file",
        "resume-with", "snapshot")  # fmt: skip
_SHORT_OF_REFUSED = {"ntasks": "n", "array": "a", "output": "o", "error": "e", "no-kill": "k"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare our options, and every one of sbatch's that is not ours."""
    from slurm_resilience.submit.parameters import REFUSED, SBATCH_FLAGS, SBATCH_OPTIONS

    add = parser.add_argument
    add(
        "--folder", metavar="DIR", default="resilience-runs", help="the run's folder is made in here (default: resilience-runs)"
    )
    add(
        "--run-dir",
        metavar="DIR",
        help="the run's own folder; one that holds a run already goes on, if no job of it waits or runs",
    )
    add("--config", metavar="FILE", help="configuration in YAML; the options below win over it")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration, e.g. limits.step_s=60")
    add("--nodes", metavar="MIN[-MAX]", help="nodes to train on (default: 1)")
    add("--spares", type=int, metavar="K", help="further nodes, kept idle and warm for lost ones (default: 0)")
    add("--ranks-per-node", type=int, metavar="K", help="ranks on each node, usually its GPUs (default: 1)")
    add("--global-batch", type=int, metavar="B", help="samples per optimizer step, whatever the number of nodes")
    add("--micro-batch", type=int, metavar="M", help="samples per forward pass on one rank")
    add("--checkpoint-every", metavar="STEPS|TIME", help="100 (steps), 90s, 30m, 2h or auto (default: 10m)")
    add("--preload", metavar="MOD,…", help="modules that warm launchers import (default: torch)")
    add("--wrap", metavar="CMD", default="", help="put before the command on every node, e.g. 'apptainer exec --nv img.sif'")
    add("--cold", action="store_true", help="start ranks by exec, without warm launchers")
    add("--python", metavar="PATH", help="interpreter of supervisor and agents on the nodes (default: this one)")
    add("--signal-delay-s", type=float, metavar="S", help="seconds of warning before the time limit (default: 90)")
    add(
        "--snapshot", nargs="?", const=True, metavar="DIR",
        help="copy the code of this folder (or DIR), as git sees it, and run that: a later attempt runs what the first one ran",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="print the script; nothing is written or queued, and no Slurm is needed")
    add("--wait", action="store_true", help="stay until the job is over; end with its exit code")
    add("--json", action="store_true", help="print one JSON document")
    checkpoint_file.configure(parser)
    for name, short in SBATCH_OPTIONS.items():
        words = [f"--{name}", *([f"-{short}"] if short else [])]
        if name in SBATCH_FLAGS:
            add(*words, nargs="?", const=True, dest=f"sbatch:{name}", help=argparse.SUPPRESS)
        else:
            add(*words, dest=f"sbatch:{name}", help=argparse.SUPPRESS)
    for name in sorted(REFUSED.keys() - set(_OWN)):  # taken, to be refused with the reason instead of as unknown
        words = [f"--{name}", *([f"-{_SHORT_OF_REFUSED[name]}"] if name in _SHORT_OF_REFUSED else [])]
        add(*words, nargs="?", const=True, dest=f"sbatch:{name}", help=argparse.SUPPRESS)
    add("argv", nargs="+", metavar="CMD", help="the command and its arguments, after --")


def execute(args: argparse.Namespace) -> int:
    """Check everything, queue the job, and say its id and its folder."""
    from slurm_resilience.cli.run import overrides
    from slurm_resilience.config import ResilienceConfig
    from slurm_resilience.submit.executor import DryRun, ResilientExecutor
    from slurm_resilience.submit.prepare import Work, chosen

    config = ResilienceConfig.load(args.config, overrides(args))
    _findable(args.argv, wrapped=bool(args.wrap), chdir=slurm_options(args).get("chdir"))
    command = tuple(checkpoint_file.command_of(args))
    folder = Path(args.run_dir).absolute().parent if args.run_dir else args.folder
    if args.run_dir and not args.dry_run and (done := _complete(Path(args.run_dir).absolute())):
        print(json.dumps({"job_id": None, "run_dir": str(Path(args.run_dir).absolute()), "said": done}) if args.json else done)
        return ExitCode.OK
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kind = DryRun if args.dry_run else ResilientExecutor
        executor = kind(folder, config=config, python=args.python, own_names=_OWN, snapshot=args.snapshot)
    for one in told:
        _note(str(one.message))
    executor.update_parameters(**slurm_options(args), signal_delay_s=args.signal_delay_s)
    work = Work(command=command, wrap=args.wrap)
    if args.dry_run:
        if ResilientExecutor.affinity() <= 0:
            _note("there is no sbatch here, so Slurm was not asked whether it would take this")
        values = ", ".join(f"{key}={value}" for key, value in chosen(config).items())
        _note(f"config.yaml in the run folder would hold {f'{values}, and the defaults' if values else 'the defaults'}")
        sys.stdout.write(
            executor.script(Path(args.run_dir or executor.folder / f"{executor.job_name}-DATE-TIME").absolute(), work)
        )
        return ExitCode.OK
    job = executor.submit_work(work, run_dir=Path(args.run_dir).absolute() if args.run_dir else None)
    if args.json:
        print(json.dumps({"job_id": job.job_id, "run_id": job.run_id, "run_dir": str(job.run_dir)}))
    else:
        print(f"run {job.run_id} in {job.run_dir}\njob {job.job_id}")
    sys.stdout.flush()
    return _wait(job) if args.wait else ExitCode.OK


def _note(text: str) -> None:
    print(f"slurm-resilience submit: note: {text}", file=sys.stderr)


def _complete(run_dir: Path) -> str:
    """Why nothing is queued for this folder; "" when its run is not complete."""
    from slurm_resilience.runtime.run_folder import RunFolder

    status = RunFolder(run_dir).status() if run_dir.is_dir() else None
    if status is None or status.state != "complete":
        return ""
    step = f" (step {status.step})" if status.step is not None else ""
    return (
        f"{run_dir}: this run is complete{step}; nothing is queued. To train on from its last checkpoint, raise the number of "
        f"steps in the script and remove {run_dir / 'state.json'}; to begin again, give another run folder"
    )


def slurm_options(args: argparse.Namespace) -> dict[str, Any]:
    """sbatch's options among the arguments, by their long names."""
    prefix = "sbatch:"
    return {name[len(prefix) :]: value for name, value in vars(args).items() if name.startswith(prefix) and value is not None}


def _findable(argv: list[str], *, wrapped: bool, chdir: str | None = None) -> tuple[str, ...]:
    """The command, if this machine knows it: a typo should not wait in the queue.  Inside a wrapper only the wrapper knows.

    A script that only the nodes can see is let through with a note: one in a folder that is not here, or that is each
    machine's own.
    """
    from slurm_resilience.runtime.command import parse_python
    from slurm_resilience.submit.folders import seen_by_nodes

    if not wrapped and shutil.which(argv[0]) is None:
        raise ConfigError(
            f"There is no command {argv[0]!r} here",
            evidence="it is not on PATH",
            remedy="give its full path, or activate the environment that has it: the job inherits it",
        )
    python = None if wrapped else parse_python(argv)
    if python is not None and python.form == "script":
        script = Path(chdir or ".").absolute() / python.target
        looked_at = os.path.isdir(script.parent) and os.access(script.parent, os.X_OK)
        if looked_at and not os.path.lexists(script) and seen_by_nodes(script.parent):
            raise ConfigError(
                f"There is no script {python.target!r}",
                evidence=f"{script.parent} is here, and {script.name} is not in it",
                remedy="give its full path, or submit from its folder",
            )
        if not os.path.lexists(script):
            _note(f"the script {python.target!r} is not there as seen from here: {script} must be on the nodes")
    return tuple(argv)


def _wait(job: Any) -> int:
    job.wait()
    failure = job.exception()
    if failure is None:
        return ExitCode.OK
    print(f"slurm-resilience submit: {failure}", file=sys.stderr)
    return int(job.exit_code or ExitCode.INTERNAL)
