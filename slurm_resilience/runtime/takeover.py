"""The supervisor that an agent starts when there is none any more: ``python -m slurm_resilience.runtime.takeover``.

A batch script that died with its node can restart nothing, and no signal reaches it.  The run goes on inside the
allocation, supervised from a node that lives.  In the end nobody's exit code would end the job: so this process gives it
back to Slurm for one node and one moment, in which the batch script finds the run's last word and ends with its code.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ExitCode, FormatError, ResilienceError
from slurm_resilience.observe import json_lines
from slurm_resilience.runtime.job_end import end_job
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.spec import Takeover
from slurm_resilience.runtime.supervisor import Supervisor
from slurm_resilience.runtime.surroundings import Surroundings
from slurm_resilience.runtime.whereabouts import address_towards
from slurm_resilience.slurm.client import CommandClient


def take_over(run_dir: Path, node: str, *, epoch: int, silent_s: float) -> int:
    """Supervise the run from this node until it ends or moves, and end its job; the exit code."""
    began = time.monotonic()
    folder = RunFolder(run_dir)
    run, before = folder.run(), folder.supervisor()
    if run is None or before is None:
        raise FormatError(f"{run_dir} holds no run that could be taken over", evidence="run.json or supervisor.json is missing")
    config = ResilienceConfig.model_validate(run["config"])
    around, spec = Surroundings.kept(run_dir)
    log = folder.open_log("supervisor")

    def tell(line: str) -> None:
        if config.observe.log_format == "json" and not line.startswith("{"):
            line = json_lines.line(line, run_id=run["run_id"])
        with contextlib.suppress(OSError):
            log.write(line + "\n")

    tell(f"slurm-resilience: {node} supervises run {run['run_id']} from here on, in place of {before.node}")
    others = {name: address for name, address in around.addresses.items() if name not in (node, before.node)}
    supervisor = Supervisor(
        folder,
        run["run_id"],
        config,
        spec,
        around.backend(folder),
        host=address_towards(others.values()),
        node=node,
        errands=around.errands(run["run_id"], folder.path),
        restarted=True,
        show=tell,
        epoch=epoch,
        takeover=Takeover(before.node, silent_s + time.monotonic() - began),
    )
    code = supervisor.run()
    if not supervisor.superseded and code != ExitCode.REQUEUED:
        end_job(CommandClient(), folder, around, code, say=tell)
    return code


def main(argv: list[str] | None = None) -> int:
    """Called by an agent that has claimed the epoch."""
    parser = argparse.ArgumentParser(
        prog="python -m slurm_resilience.runtime.takeover", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--silent-s", type=float, required=True)
    args = parser.parse_args(argv)
    try:
        return take_over(args.run_dir.absolute(), args.node, epoch=args.epoch, silent_s=args.silent_s)
    except ResilienceError as error:
        print(f"{args.node} cannot take over: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
