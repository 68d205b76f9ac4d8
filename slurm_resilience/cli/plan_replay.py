"""``plan replay``: what failures that really happened would have cost under stock Slurm, and with recovery in the allocation.

Stock Slurm requeues at each failure and finds another node in the queue.  With tiers a run recovers inside its allocation; a
lost node that no spare replaces makes it smaller until a later restart, or, when --min-nodes does not allow that, requeues it.

TRACE is a CSV file (a column t_s, t_min, t_h, t_days or time, and optionally cause and node), the folder of a run, or its
events.jsonl.  For a run, what was not given is taken from what the run itself showed; what it did not show is assumed, and
named.  Its measured ETTR is printed, and beside it the replay of the run as it was, which gives the same within 2 %.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from slurm_resilience.cli.plan_options import minutes, positive, span, table
from slurm_resilience.errors import ConfigError, ExitCode
from slurm_resilience.observe.accounts import Account, Measured, account
from slurm_resilience.observe.failures import Trace
from slurm_resilience.observe.json_text import dumps
from slurm_resilience.observe.ledger import Ledger
from slurm_resilience.plan.as_it_was import RELAUNCH_S, START_S, as_it_was
from slurm_resilience.plan.replay import OUR_DETECT_S, OUR_QUEUE_S, STOCK_QUEUE_S, Policy, ours, replay, stock
from slurm_resilience.plan.trace import read_csv

_WORDS = {
    "interval_s": "a save every",
    "save_s": "for which training stops",
    "start_s": "a cold start",
    "relaunch_s": "a relaunch",
    "queue_s": "our queue",
    "stock_queue_s": "stock Slurm's queue",
}
_UNKNOWN = Measured()
_NAMES = {
    "as_it_was": "replayed as it was",
    "stock": "stock Slurm",
    "ours": "with tiers, goes on with fewer nodes",
    "ours_full_size": "with tiers, requeues for a lost node",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("trace", metavar="TRACE", help="CSV file, run folder or events.jsonl")
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes of the job (default: of the run; 1 for a CSV)")
    parser.add_argument(
        "--interval-min", type=minutes, dest="interval_s", metavar="M", help="training between two saves (default 30)"
    )
    parser.add_argument("--save-min", type=minutes, dest="save_s", metavar="W", help="what a save stops training (default 0)")
    parser.add_argument(
        "--restart-min", type=minutes, dest="start_s", metavar="U", help="a cold start to the first step (default 5)"
    )
    parser.add_argument(
        "--relaunch-min", type=minutes, dest="relaunch_s", metavar="R", help="a start inside the allocation (default 1)"
    )
    parser.add_argument(
        "--queue-min", type=minutes, dest="queue_s", metavar="Q", help="queue at a requeue (defaults: 2.1 stock, 0.67 ours)"
    )
    parser.add_argument("--spares", type=int, default=0, metavar="N", help="spare nodes in the allocation (default 0)")
    parser.add_argument(
        "--repair-h", type=float, default=24.0, metavar="H", help="hours until a lost node is back (default 24)"
    )
    parser.add_argument("--min-nodes", type=positive, default=1, metavar="N", help="fewest nodes to train on (default 1)")


def execute(args: argparse.Namespace) -> int:
    """Print the ledgers."""
    trace, run = _read(args.trace)
    measured = run.measured if run else _UNKNOWN
    nodes = args.nodes or (run.nodes if run else 1)
    policies, assumed = _policies(args, measured, nodes)
    ledgers = {name: replay(trace, policy, nodes=nodes) for name, policy in policies.items()}
    if run is not None:
        own = as_it_was(trace, measured)
        ledgers = {"as_it_was": own.ledger, **ledgers}
        assumed |= {f"as_it_was:{name}": value for name, value in own.assumed.items()}
    if args.json:
        document = {
            "ettr": run.ledger.ettr if run else ledgers["ours"].ettr,
            "measured": run.ledger.to_json() if run else None,
            "policies": {name: ledger.to_json() for name, ledger in ledgers.items()},
            "failures": len(trace.failures),
            "hours": trace.length_s / 3600,
            "nodes": nodes,
            "complete": run.complete if run else None,
            "parameters_s": dataclasses.asdict(measured) if run else None,
            "assumed_s": assumed if run else None,
        }
        print(dumps(document))
        return ExitCode.OK
    count = len(trace.failures)
    print(f"{count} failure{'s' * (count != 1)} in {span(trace.length_s)} on {nodes} node{'s' * (nodes > 1)}")
    header = ("", "ETTR", "kept", "saving", "done again", "restarting", "queued", "fewer nodes", "requeues")
    rows = [_row("measured", run.ledger)] if run else []
    rows += [_row(_NAMES[name], ledger) for name, ledger in ledgers.items()]
    table([header, *rows])
    if run and assumed:
        print(
            f"Assumed, since the run did not show it: {', '.join(f'{_words(name)} {span(s)}' for name, s in assumed.items())}"
        )
    return ExitCode.OK


def _words(name: str) -> str:
    who, _, what = name.rpartition(":") if name.startswith("as_it_was") else ("", "", name)
    return f"{what} (as it was)" if who else _WORDS.get(what, what)


def _read(path: str) -> tuple[Trace, Account | None]:
    from slurm_resilience.observe.events import FILE_NAME, read_for_standing

    where = Path(path)
    if where.is_dir() or where.name == FILE_NAME:
        folder = where if where.is_dir() else where.parent
        if not (folder / FILE_NAME).exists():
            raise ConfigError(f"{folder} has no {FILE_NAME}", remedy="give the folder of a run, or a CSV file")
        run = account(read_for_standing(folder))  # as the report does: one answer
        return run.trace, run
    try:
        with open(where, encoding="utf-8-sig", newline="") as file:
            return read_csv(file, name=path), None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the trace {path}", evidence=str(error)) from error


def _policies(args: argparse.Namespace, measured: Measured, nodes: int) -> tuple[dict[str, Policy], dict[str, float]]:
    """The policies, and what of them neither the user gave nor the run showed, in seconds."""
    assumed: dict[str, float] = {}

    def pick(name: str, default: float) -> float:
        given, seen = getattr(args, name), getattr(measured, name)
        if given is None and seen is None:
            assumed[name] = default
        return float(given if given is not None else default if seen is None else seen)

    if args.spares < 0 or args.repair_h < 0:
        raise ConfigError("--spares and --repair-h cannot be negative")
    first_s = measured.first_start_s
    if args.start_s is None and measured.start_s is None and first_s is not None:
        args.start_s = first_s  # the only start that the run showed
    interval_s, save_s, start_s = pick("interval_s", 1800.0), pick("save_s", 0.0), pick("start_s", START_S)
    queue_s = STOCK_QUEUE_S if args.queue_s is None else args.queue_s
    if args.queue_s is None:
        assumed["stock_queue_s"] = queue_s
    tiers = ours(
        interval_s=interval_s,
        save_s=save_s,
        start_s=start_s,
        relaunch_s=pick("relaunch_s", RELAUNCH_S),
        queue_s=pick("queue_s", OUR_QUEUE_S),
        spares=args.spares,
        repair_s=args.repair_h * 3600,
        min_nodes=args.min_nodes,
    )
    tiers = dataclasses.replace(tiers, detect_s={**OUR_DETECT_S, **measured.detect_s})
    policies = {
        "stock": stock(interval_s=interval_s, save_s=save_s, start_s=start_s, queue_s=queue_s),
        "ours": tiers,
        "ours_full_size": dataclasses.replace(tiers, min_nodes=nodes),
    }
    end_s = measured.end_s or 0.0
    return {name: dataclasses.replace(policy, first_start_s=first_s, end_s=end_s) for name, policy in policies.items()}, assumed


def _row(name: str, ledger: Ledger) -> tuple[str, ...]:
    parts = (ledger.productive_s, ledger.saving_s, ledger.lost_s, ledger.restart_s, ledger.queued_s, ledger.reduced_s)
    return (name, f"{ledger.ettr:.3f}", *(span(part) for part in parts), str(ledger.requeues))
