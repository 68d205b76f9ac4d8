"""Plan before you submit: meshes on fewer nodes, checkpoint intervals, effective training time, replayed failures.

Nothing here asks Slurm or changes anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from slurm_resilience.cli import plan_ettr, plan_interval, plan_mesh, plan_replay

_VERBS = {
    "mesh": (plan_mesh, "mesh, batch and spares on these nodes and on every smaller allocation"),
    "interval": (plan_interval, "the best time between two checkpoints"),
    "ettr": (plan_ettr, "the share of the time that will be training that is kept (ETTR)"),
    "replay": (plan_replay, "a failure trace, or a run's own events, under other policies"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, summary) in _VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        module.configure(verb)
        verb.add_argument("--json", action="store_true", help="print one JSON document")
        verb.set_defaults(run=module.execute)


def execute(args: argparse.Namespace) -> int:
    """Run the verb."""
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)
