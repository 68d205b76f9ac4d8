"""One self-contained page about a run: what happened when, the loss over it, where the time went, each incident.

It opens offline in any browser, light or dark.  RUN is a run folder or a job id; the run may still go on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="a run folder or a job id")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("report.html"), help="default: report.html")


def execute(args: argparse.Namespace) -> int:
    """Write it."""
    from slurm_resilience._atomic import write_output
    from slurm_resilience.observe.report.page import headline, render
    from slurm_resilience.observe.report.story import read

    folder, _ = which_run.find(args.run)
    story = read(folder)
    try:
        write_output(args.output, render(story))
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written", evidence=f"{type(error).__name__}: {error}") from error
    print(f"{headline(story)}\n{args.output.absolute()}")
    return int(ExitCode.OK)
