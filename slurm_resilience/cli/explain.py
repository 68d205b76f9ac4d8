"""One page for each incident of a run: cause, rank, node, first exception, times, what was decided and why, what came next.

RUN is a run folder or a job id.  Only records are read: the run may be over, or on another machine.
"""

from __future__ import annotations

import argparse
import json

from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="a run folder or a job id")
    parser.add_argument("--incident", type=int, metavar="N", help="only the Nth one, counted from 1; -1 is the last")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Print them."""
    from slurm_resilience.observe.events import FILE_NAME
    from slurm_resilience.observe.explain import explain
    from slurm_resilience.observe.explain_page import page

    folder, _ = which_run.find(args.run)
    if not (folder / FILE_NAME).exists():
        raise ConfigError(
            f"There is nothing to explain in {folder}",
            evidence=f"{folder / FILE_NAME} does not exist",
            remedy="give the folder that `slurm-resilience run` names in its first line, once the run has begun",
        )
    found = list(enumerate(explain(folder), start=1))
    count = len(found)
    if args.incident is not None:
        wanted = args.incident if args.incident > 0 else count + 1 + args.incident
        found = [each for each in found if each[0] == wanted]
        if not found:
            raise ConfigError(
                f"There is no incident {args.incident} in {folder}",
                evidence=f"there are {count}",
                remedy="leave --incident out to see all of them",
            )
    if args.json:
        incidents = [{"number": number, **one.as_dict()} for number, one in found]
        print(json.dumps({"run_dir": str(folder), "incidents": incidents}, default=str))
    elif not found:
        print("no incidents")
    else:
        print("\n\n".join(page(one, number=number, of=count) for number, one in found))
    return int(ExitCode.OK)
