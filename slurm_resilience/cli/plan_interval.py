"""``plan interval``: the best time between two checkpoints, and what another choice would cost.

The exact optimum depends on the cost of a save and on how often the job fails, not on restart or queue.  Where nothing ever
fails there is none: then it is the longest interval that `checkpoint.auto_bounds_min` allows, an hour.
"""

from __future__ import annotations

import argparse
import dataclasses

from slurm_resilience.cli.plan_options import add_scenario, nodes_of, span, table, write_chart
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.json_text import dumps
from slurm_resilience.plan import chart, ettr
from slurm_resilience.plan.interval import LONGEST_S, best_s, daly_s, young_s
from slurm_resilience.plan.scenario import DAY_S, Scenario, parse_rate

_FACTORS = (0.125, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_scenario(parser)


def execute(args: argparse.Namespace) -> int:
    """Print the recommendation."""
    nodes, rate = nodes_of(args), parse_rate(args.rate)
    mttf_s = DAY_S / (nodes * rate) if rate else float("inf")
    best = best_s(args.save_s, mttf_s) if rate else LONGEST_S
    scenario = Scenario(nodes, rate, best, args.save_s, args.restart_s, args.queue_s)
    curve = [(best * factor, ettr.exact(dataclasses.replace(scenario, interval_s=best * factor))) for factor in _FACTORS]
    if args.svg:
        wide = [best * 2 ** (step / 4) for step in range(-24, 25)]
        points = [(s / 60, ettr.exact(dataclasses.replace(scenario, interval_s=s))) for s in wide]
        write_chart(
            args.svg,
            chart.svg(
                f"ETTR of {nodes} nodes, a save costs {span(args.save_s)}",
                "interval (min)",
                "ETTR (exact)",
                [("exact", points)],
            ),
        )
    rules = {"exact": best}
    if rate:
        rules.update(young=young_s(args.save_s, mttf_s), daly=daly_s(args.save_s, mttf_s))
    if args.json:
        document = {
            "interval_min": best / 60,
            **{f"{name}_min": rules[name] / 60 if name in rules else None for name in ("exact", "young", "daly")},
            "ettr": ettr.estimate(scenario),
            "closed_form": ettr.first_order(scenario),
            "exact": ettr.exact(scenario),
            "nodes": nodes,
            "rate_per_node_day": rate,
            "mttf_h": mttf_s / 3600 if rate else None,
            "curve": [[seconds / 60, value] for seconds, value in curve],
        }
        print(dumps(document))
        return ExitCode.OK
    seldom = f"{nodes} nodes fail every {span(mttf_s)}" if rate else "nothing ever fails, so that the longest allowed is best"
    print(f"Save every {span(best)}: {seldom}, a save costs {span(args.save_s)}.")
    table(
        [
            (name, span(seconds), f"{ettr.exact(dataclasses.replace(scenario, interval_s=seconds)):.4f}")
            for name, seconds in rules.items()
        ]
    )
    print(f"ETTR from {span(curve[0][0])} to {span(curve[-1][0])}: {chart.sparkline([value for _, value in curve])}")
    table([("interval", "ETTR"), *((span(seconds), f"{value:.4f}") for seconds, value in curve)])
    return ExitCode.OK
