"""What happened in a run: its events as lines, its incidents with the time each part of coming back took."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_resilience.cli.document import document
from slurm_resilience.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from slurm_resilience.observe.incidents import Incident

_FOLLOW_S = 0.2
_ENDS = frozenset({"run_completed", "run_failed"})


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="one JSON document; with --follow one JSON object a line")
    parser.add_argument("--incidents", action="store_true", help="only what went wrong, with its phases in seconds")
    parser.add_argument("--follow", action="store_true", help="go on with new events until the run ends")


def execute(args: argparse.Namespace) -> int:
    """Print them."""
    from slurm_resilience.observe.events import FILE_NAME, read_events
    from slurm_resilience.observe.incidents import Incidents
    from slurm_resilience.observe.json_text import dumps

    path = Path(args.run_dir) / FILE_NAME
    if not path.exists() and not args.follow:
        _refuse_before_the_start(Path(args.run_dir))
        raise ConfigError(
            f"There are no events in {args.run_dir}",
            evidence=f"{path} does not exist",
            remedy="give the folder that `slurm-resilience run` names in its first line",
        )
    if args.incidents:
        found = Incidents.of(read_events(args.run_dir))
        print(dumps([incident.as_dict() for incident in found], indent=2) if args.json else table(found))
    elif args.follow:
        _print(follow(Path(args.run_dir)), as_json=args.json)
    elif args.json:
        _print_document(read_events(args.run_dir))
    else:
        _print(read_events(args.run_dir), as_json=False)
    return int(ExitCode.OK)


def _refuse_before_the_start(run_dir: Path) -> None:
    """A run that was submitted and has not begun is no mistake in the folder's name."""
    described = document(run_dir / "job.json")
    if not described and not (run_dir / "run.json").exists():
        return
    number = f"job {described['job_id']}" if described.get("job_id") else ""
    in_slurm = number and described.get("cluster") == "slurm"
    look = f"`squeue -j {described['job_id']}`" if in_slurm else f"the logs in {run_dir / 'logs'}"
    raise ConfigError(
        f"The run in {run_dir} has not started yet, so there are no events",
        evidence=f"it is {number or 'prepared'}, and no supervisor has written anything",
        remedy=f"{look} says whether it waits; --follow waits for its first event",
    )


def follow(run_dir: Path) -> Iterator[dict[str, Any]]:
    """All events of the run, and those to come, until one that ends it.  Each byte of the file is read once."""
    from slurm_resilience.observe.events import FILE_NAME, parse

    path, rest = run_dir / FILE_NAME, b""
    while not path.exists():
        time.sleep(_FOLLOW_S)
    with open(path, "rb") as file:
        while True:
            data = file.read(1 << 20)
            if not data:
                time.sleep(_FOLLOW_S)
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = parse(line + b"\n")
                if event is None:  # the torn last line of a supervisor that died
                    continue
                yield event
                if event["event"] in _ENDS:
                    return


def _print_document(events: Iterator[dict[str, Any]]) -> None:
    """One JSON array, an event a line, without keeping them: a long run has a gigabyte."""
    from slurm_resilience.observe.json_text import dumps

    separator = "["
    for event in events:
        print(separator + dumps(event), end="")
        separator = ",\n "
    print("]" if separator != "[" else "[]")


def _print(events: Iterator[dict[str, Any]], *, as_json: bool) -> None:
    from slurm_resilience.observe.json_text import dumps
    from slurm_resilience.observe.narrator import Narrator

    narrator = Narrator()
    for event in events:
        lines = [dumps(event)] if as_json else narrator.lines(event)
        for line in lines:
            print(line, flush=True)
    sys.stdout.flush()


def table(incidents: Sequence[Incident]) -> str:
    """Incidents as text: a line each, phases in seconds since the fault."""
    from slurm_resilience.observe.incidents import numbered

    if not incidents:
        return "no incidents"
    rows = []
    for number, each in numbered(incidents):
        phases = " ".join(f"{name}={seconds:.2f}" for name, seconds in each.as_dict()["phases"].items() if name != "fault")
        where = ", ".join(part for part in (each.node, f"rank {each.rank}" if each.rank is not None else None) if part)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each.t))
        end = f"back in {each.seconds:.2f} s" if each.seconds is not None else each.outcome()
        again = f"; {each.steps_lost} step{'s' if each.steps_lost != 1 else ''} done again" if each.steps_lost else ""
        label = f"{number}." if number is not None else "-"
        rows.append(f"{label} {stamp} UTC  attempt {each.attempt}: {each.cause}{f' ({where})' if where else ''}: {end}{again}")
        rows.append(f"   {each.detail}" if each.detail else "   (no detail)")
        rows.append(f"   {phases or 'no phase was reached'}")
    return "\n".join(rows)
