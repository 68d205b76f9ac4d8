"""What this cluster will do to your job: on preemption, at the time limit, when a node dies, when a prolog fails.

Reads the cluster's settings as you may read them, tries the folder that runs are to live in, and says what is dangerous and
the fix.  Changes nothing.  Ends with 78 when something is dangerous.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from slurm_resilience.doctor.findings import Finding
    from slurm_resilience.doctor.forecast import Forecast


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--partition", metavar="P", help="default: the cluster's default partition")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where runs (are to) live; an earlier run tells how long a save takes"
    )
    parser.add_argument("--script", type=Path, metavar="FILE", help="also read the #SBATCH lines of a batch script")
    parser.add_argument("--save-seconds", type=float, metavar="S", help="how long a checkpoint takes")
    parser.add_argument("--notes", action="store_true", help="also show what is only worth knowing")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Look, and tell."""
    from slurm_resilience.doctor import findings, folder, forecast, script, site

    if args.save_seconds is not None and not args.save_seconds > 0:
        raise ConfigError(f"--save-seconds {args.save_seconds:g} is no duration of a save")
    save_s = args.save_seconds if args.save_seconds is not None else _measured(args.run_dir)
    given = {} if args.script is None else script.read(args.script)
    here = site.look(args.partition or given.get("partition"))
    found = findings.of_site(here, save_s=save_s)
    found += folder.check(args.run_dir.absolute()) if args.run_dir is not None else []
    found += script.of_options(given, str(args.script)) if args.script is not None else []
    lead = script.lead_s(given)
    told = forecast.all_of(here, lead_s=forecast.DEFAULT_LEAD_S if lead is None else lead)
    shown = [finding for finding in found if args.notes or args.json or finding.level != "note"]
    if args.json:
        document = {
            "v": 1,
            "slurm": here.config.get("SLURM_VERSION"),
            "partition": here.partition,
            "save_s": save_s,
            "forecasts": [asdict(one) for one in told],
            "findings": [finding.to_json() for finding in found],
        }
        print(json.dumps(document))
    else:
        _print(f"Slurm {here.config.get('SLURM_VERSION', '?')}, partition {here.partition}", told, shown)
    return int(ExitCode.CONFIG_ERROR if any(finding.level == "danger" for finding in found) else ExitCode.OK)


def _measured(run_dir: Path | None) -> float | None:
    """The median time of a save in an earlier run there."""
    from slurm_resilience.observe.events import read_for_standing

    if run_dir is None:
        return None
    facts = read_for_standing(run_dir)
    times = [fact["seconds"] for fact in facts if fact["event"] == "checkpoint_committed" and "seconds" in fact]
    return statistics.median(times) if times else None


def _print(headline: str, told: list[Forecast], found: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(headline, style="bold"))
    for one in told:
        console.print(Text(f"\n{one.event.replace('_', ' ')}", style="bold"))
        console.print(Text(one.says))
    console.print()
    colours = {"danger": "bold red", "warning": "yellow", "note": "dim"}
    for finding in found:
        console.print(Text(f"{finding.level}: {finding.what}", style=colours[finding.level]))
        console.print(Text(f"  how we know: {finding.evidence}"))
        if finding.remedy:
            console.print(Text(f"  what to do:  {finding.remedy}"))
    if not found:
        console.print("Nothing is in the way.")
