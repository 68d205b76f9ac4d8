"""``nodes forgive``: take a node back that a run leaves out because ranks crashed there."""

from __future__ import annotations

import argparse

from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode, nearest

_LIVES = ("allocation_started", "run_completed", "run_failed")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="a run folder or a job id")
    parser.add_argument("node", metavar="NODE", help="the node that the run shall use again")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Leave the wish in the run folder, where the run's supervisor looks every second."""
    from slurm_resilience.observe.events import FILE_NAME, read_for_standing
    from slurm_resilience.observe.json_text import dumps
    from slurm_resilience.observe.subject import known
    from slurm_resilience.runtime import forgiveness
    from slurm_resilience.runtime.history import History

    folder, _ = which_run.find(args.run)
    nodes, _ = known(read_for_standing(folder))
    if not (folder / FILE_NAME).exists():
        raise ConfigError(f"There is no run in {folder}", evidence=f"it holds no {FILE_NAME}")
    if args.node not in nodes:
        raise ConfigError(
            f"The run in {folder} has no node {args.node!r}",
            evidence=f"its nodes are {' '.join(nodes[:16]) or 'not known yet'}",
            remedy=nearest(args.node, nodes) if nodes else "wait until it has begun",
        )
    why = History.replay(read_for_standing(folder)).suspects.get(args.node)
    if why is None:
        said = (
            f"{args.node} is no suspect: nothing has to be forgiven (`slurm-resilience explain {folder} {args.node}` says more)"
        )
    else:
        try:
            forgiveness.ask(folder, args.node)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written", evidence=f"{type(error).__name__}: {error}") from error
        last = [event["event"] for event in read_for_standing(folder) if event["event"] in _LIVES]
        over = last[-1:] != ["allocation_started"]
        when = "when it is started again" if over else "from its next launch on, or from its next checkpoint"
        said = f"{args.node} is taken back ({why}); the run uses it {when}"
    print(dumps({"run_dir": str(folder), "node": args.node, "forgiven": why}) if args.json else said)
    return int(ExitCode.OK)
