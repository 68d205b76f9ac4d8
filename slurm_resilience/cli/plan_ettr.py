"""``plan ettr``: how much of the time will be training that is kept, by formula and by simulation.

ETTR = productive time / all time, queue included.  Without --interval-min the interval of Young's rule is taken.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from slurm_resilience.cli.plan_options import add_scenario, minutes, nodes_of, not_negative, positive, span, table, write_chart
from slurm_resilience.errors import ConfigError, ExitCode
from slurm_resilience.observe.json_text import dumps
from slurm_resilience.observe.ledger import Ledger
from slurm_resilience.plan import chart, ettr
from slurm_resilience.plan.interval import LONGEST_S, best_s, young_s
from slurm_resilience.plan.scenario import DAY_S, RATES, Scenario, parse_rate


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_scenario(parser)
    parser.add_argument(
        "--interval-min", type=minutes, dest="interval_s", metavar="M", help="minutes of training between two saves"
    )
    parser.add_argument("--days", type=positive, default=365, help="days to simulate at least (default 365)")
    parser.add_argument("--seed", type=not_negative, default=0, help="seed of the simulation")
    parser.add_argument(
        "--shape",
        type=float,
        default=1.0,
        metavar="K",
        help="Weibull shape of a node's time to failure (1: memoryless; 0.7: bursts)",
    )


def execute(args: argparse.Namespace) -> int:
    """Print the plan."""
    from slurm_resilience.plan.simulation import simulate

    scenario = _scenario(args)
    ledger = simulate(scenario, days=args.days, seed=args.seed, shape=args.shape)
    document = describe(scenario, ledger)
    if args.svg:
        write_chart(args.svg, _chart(scenario))
    if args.json:
        print(dumps({**document, "days": args.days, "seed": args.seed, "shape": args.shape}))
        return ExitCode.OK
    often = f"one every {span(scenario.mttf_s)}" if scenario.rate else "none, ever"
    print(
        f"{scenario.nodes} nodes, {scenario.rate * 1000:g} failures per 1,000 node-days: {often}; "
        f"a save every {span(scenario.interval_s)}"
    )
    table(_rows(scenario, document, ledger))
    return ExitCode.OK


def describe(scenario: Scenario, ledger: Ledger) -> dict[str, Any]:
    """The plan as plain values; null where something does not exist (no failures, saves that cost nothing)."""
    failing = scenario.failures_per_s > 0
    return {
        "ettr": ettr.estimate(scenario),
        "closed_form": ettr.first_order(scenario),
        "exact": ettr.exact(scenario),
        "simulated": ledger.ettr,
        "nodes": scenario.nodes,
        "rate_per_node_day": scenario.rate,
        "mttf_h": scenario.mttf_s / 3600 if failing else None,
        "interval_min": scenario.interval_s / 60,
        "best_interval_min": best_s(scenario.save_s, scenario.mttf_s) / 60 if failing and scenario.save_s else None,
        "save_min": scenario.save_s / 60,
        "restart_min": scenario.restart_s / 60,
        "queue_min": scenario.queue_s / 60,
        "simulation": ledger.to_json(),
    }


def _scenario(args: argparse.Namespace) -> Scenario:
    nodes, rate, interval = nodes_of(args), parse_rate(args.rate), args.interval_s
    if interval is None:
        if not args.save_s:
            raise ConfigError(
                "There is no checkpoint interval",
                evidence="Young's rule needs what a save costs",
                remedy="give --interval-min, or --save-min",
            )
        interval = young_s(args.save_s, DAY_S / (nodes * rate)) if rate else LONGEST_S
    return Scenario(nodes, rate, interval, args.save_s, args.restart_s, args.queue_s)


def _rows(scenario: Scenario, document: dict[str, Any], ledger: Ledger) -> list[tuple[str, str, str]]:
    shares = {
        "saving": ledger.saving_s,
        "done again": ledger.lost_s,
        "restarting": ledger.restart_s,
        "queued": ledger.queued_s,
    }
    spent = ", ".join(f"{name} {value / ledger.wall_s:.1%}" for name, value in shares.items())
    rows = [
        ("ETTR", f"{document['ettr']:.3f}", "to compare with published figures (cautious)"),
        ("closed form", f"{document['closed_form']:.3f}", "first order; too low when failures are frequent"),
        ("exact", f"{document['exact']:.3f}", "exponential failures, also during a restart"),
        ("simulated", f"{document['simulated']:.3f}", f"{ledger.failures:,} failures: {spent}"),
    ]
    if document["best_interval_min"] is not None:
        best = document["best_interval_min"] * 60
        better = ettr.exact(dataclasses.replace(scenario, interval_s=best))
        rows.append(("best interval", span(best), f"gives {better:.3f} (exact)"))
    for name, rate in RATES.items():
        other = dataclasses.replace(scenario, rate=rate)
        rows.append((f"{name} fleet", f"{ettr.exact(other):.3f}", f"{rate * 1000:g} per 1,000 node-days, same interval"))
    return rows


def _chart(scenario: Scenario) -> str:
    sizes = [2**power for power in range(15)]
    series = [
        (
            f"{name} ({rate * 1000:g})",
            [(float(n), ettr.exact(dataclasses.replace(scenario, nodes=n, rate=rate))) for n in sizes],
        )
        for name, rate in RATES.items()
    ]
    title = (
        f"ETTR, a save every {span(scenario.interval_s)}, restart {span(scenario.restart_s)}, queue {span(scenario.queue_s)}"
    )
    return chart.svg(title, "nodes", "ETTR (exact)", series)
