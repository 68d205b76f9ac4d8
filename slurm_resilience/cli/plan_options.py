"""Options and output that the verbs of ``plan`` share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence

from slurm_resilience.errors import ConfigError


def positive(text: str) -> int:
    """A whole number of at least one, for argparse."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text.strip()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number that we can use")
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least zero, for argparse."""
    return 0 if text.strip() == "0" else positive(text)


def few_to_many(text: str) -> tuple[int | None, int]:
    """Nodes as ``4``, or as the fewest and the most, ``2-4``, for argparse."""
    low, dash, high = text.strip().partition("-")
    if not dash or not low:
        return None, positive(text)
    fewest, most = positive(low), positive(high)
    if fewest > most:
        raise argparse.ArgumentTypeError(f"{text}: the fewest are more than the most; did you mean {most}-{fewest}?")
    return fewest, most


def minutes(text: str) -> float:
    """Minutes, not negative; returned in seconds."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes")
    return value * 60


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """Nodes, failures and the costs of saving and restarting."""
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes of the job")
    parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs of the job instead, 8 to a node")
    parser.add_argument(
        "--rate",
        default="typical",
        metavar="R",
        help="failures per node-day (0.0065), or per 1,000 node-days from 0.1 on (6.5), or good (2), typical (6.5), bad (20)",
    )
    parser.add_argument(
        "--save-min", type=minutes, default=0.0, dest="save_s", metavar="W", help="minutes that a save stops training"
    )
    parser.add_argument(
        "--restart-min",
        type=minutes,
        default=300.0,
        dest="restart_s",
        metavar="U",
        help="minutes from failure to first step without the queue: detection, teardown, start, load, verification (default 5)",
    )
    parser.add_argument(
        "--queue-min", type=minutes, default=0.0, dest="queue_s", metavar="Q", help="minutes in the queue at each restart"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a chart as well")


def nodes_of(args: argparse.Namespace) -> int:
    """The nodes that were asked for.  Raises :class:`ConfigError` unless exactly one of --nodes and --gpus is given."""
    if (args.nodes is None) == (args.gpus is None):
        raise ConfigError("Give the size of the job once", remedy="either --nodes N or --gpus N")
    return int(args.nodes) if args.nodes is not None else math.ceil(args.gpus / 8)


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def span(seconds: float) -> str:
    """A duration to read: 42 s, 7.0 min, 3.1 h, 18 d."""
    for limit, unit, name in ((90, 1, "s"), (5_400, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86_400:.3g} d"


def write_chart(path: str, text: str) -> None:
    """Write the chart.  Raises :class:`ConfigError` when it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"Cannot write the chart {path}", evidence=str(error)) from error
