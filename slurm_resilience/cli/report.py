"""One self-contained page about a run: what happened when, the loss over it, where the time went, each incident.

It opens offline in any browser, light or dark.  RUN is a run folder or a job id; the run may still go on.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="a run folder or a job id")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="default: report.html in the run folder, or here if that may not be written")  # fmt: skip


def execute(args: argparse.Namespace) -> int:
    """Write it."""
    from slurm_resilience._atomic import write_output
    from slurm_resilience.observe.report.page import headline, render
    from slurm_resilience.observe.report.story import read

    folder, _ = which_run.find(args.run)
    story = read(folder)
    output: Path = args.output or _default(folder)
    if args.output is None and output.parent != folder:
        said = "replaced" if output.exists() else "written here"
        print(f"slurm-resilience report: note: {folder} may not be written; {output} is {said}", file=sys.stderr)
    try:
        write_output(output, render(story))
    except OSError as error:
        raise ConfigError(f"{output} cannot be written", evidence=f"{type(error).__name__}: {error}") from error
    print(f"{headline(story)}\n{output.absolute()}")
    return int(ExitCode.OK)


def _default(folder: Path) -> Path:
    """Where the page goes when nobody says it: beside its run, so that another run's does not take its place."""
    return (folder if os.access(folder, os.W_OK | os.X_OK) else Path()) / "report.html"
