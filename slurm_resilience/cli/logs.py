"""What the ranks of a run printed: of rank 0, and of the rank at which the attempt failed, unless others are asked for.

    slurm-resilience logs                        the newest run below this folder, its newest attempt, the last lines
    slurm-resilience logs RUN --rank 3 --lines 0     all that rank 3 printed
    slurm-resilience logs RUN --rank all --follow    what all ranks print, over relaunches, until the run is over

RUN is a run folder or a job id.  With more than one log each line begins with where it comes from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode
from slurm_resilience.observe import logs

_LINES = 20
_OVER = ("complete", "failed", "cancelled")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run folder or a job id (default: the newest run below this folder)")
    add("--rank", action="append", metavar="N", help="this rank, or all; may be given again")
    add("--attempt", type=int, metavar="N", help="that attempt; -1 is the last, -2 the one before (default: the last)")
    add("--node", metavar="NODE", help="a node's agent and launcher instead of ranks")
    add("--supervisor", action="store_true", help="the supervisor's own log instead of ranks")
    add("--lines", type=int, default=_LINES, metavar="N", help=f"so many last lines of each; 0: all (default: {_LINES})")
    add("--follow", action="store_true", help="go on with what comes, until the run is over, or Ctrl-C")
    add("--json", action="store_true", help="print one JSON document; with --follow one JSON object a line")


def execute(args: argparse.Namespace) -> int:
    """Print them."""
    if args.lines < 0:
        raise ConfigError(f"--lines {args.lines} makes no sense", remedy="0 shows all lines")
    if sum(map(bool, (args.rank, args.node, args.supervisor))) > 1:
        raise ConfigError("--rank, --node and --supervisor exclude each other", remedy="give one of them")
    folder = which_run.find(args.run)[0] if args.run else which_run.newest()
    if not args.run and not args.json:
        print(f"{folder}:", file=sys.stderr)
    chosen = _chooser(folder, args)
    files = chosen()
    if not files and not args.follow:
        raise _nothing(folder, args)
    if args.json and not args.follow:
        found = [{"log": label, "path": str(path), "lines": _tail(path, args.lines)[0]} for label, path in files.items()]
        print(json.dumps({"run_dir": str(folder), "logs": found}))
        return int(ExitCode.OK)
    say = _sayer(files, as_json=args.json, always=args.follow)
    known = {}
    for label, path in files.items():
        lines, known[path] = _tail(path, args.lines)
        for line in lines:
            say(label, line)
    if args.follow:
        for label, line in logs.follow(logs.Follower(chosen, known), lambda: _over(folder, args)):
            say(label, line)
    return int(ExitCode.OK)


def _tail(path: Path, lines: int) -> tuple[list[str], int]:
    try:
        return logs.tail(path, lines or None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", evidence=f"{type(error).__name__}: {error}") from error


def _sayer(files: dict[str, Path], *, as_json: bool, always: bool) -> Callable[[str, str], None]:
    def say(label: str, line: str) -> None:
        if as_json:
            print(json.dumps({"log": label, "line": line}), flush=True)
        else:
            print(f"{label} | {line}" if always or len(files) > 1 else line, flush=always)

    return say


def _chooser(folder: Path, args: argparse.Namespace) -> Callable[[], dict[str, Path]]:
    """Which files are meant now: label → path.  Raises :class:`ConfigError` for a word that is no rank."""
    if args.supervisor:
        own = folder / "logs" / "supervisor.log"
        return lambda: {"supervisor": own} if own.exists() else {}
    if args.node:
        return lambda: {f"{args.node} {kind}": path for kind, path in logs.of_node(folder, args.node).items()}
    for word in args.rank or ():
        if word != "all" and not word.isdecimal():
            raise ConfigError(f"--rank {word} is no rank", remedy="give a number, counted from 0, or all")
    every = "all" in (args.rank or ())
    wanted = {int(word) for word in args.rank or () if word != "all"}

    def choose() -> dict[str, Path]:
        attempt = _attempt(folder, args.attempt)
        found = logs.ranks(folder, attempt) if attempt is not None else {}
        named = wanted or {0, *_at_fault(folder, attempt)} if not every else set(found)
        return {f"a{attempt} rank {rank}": path for rank, path in found.items() if rank in named}

    return choose


def _attempt(folder: Path, asked: int | None) -> int | None:
    there = logs.attempts(folder)
    if asked is None or asked < 0:
        back = -1 if asked is None else asked
        return there[back] if len(there) >= -back else None
    return asked if asked in there else None


def _at_fault(folder: Path, attempt: int | None) -> set[int]:
    """The rank at which this attempt failed, as its record says."""
    record: Any = None
    try:
        record = read_json(folder / "incidents" / f"{attempt:04d}.json") if attempt is not None else None
    except (ValueError, OSError):
        return set()
    ends = record.get("ends") if isinstance(record, dict) else None
    failed = [each for each in ends or () if isinstance(each, dict) and each.get("code")]
    return {int(failed[0]["rank"])} if failed and isinstance(failed[0].get("rank"), int) else set()


def _over(folder: Path, args: argparse.Namespace) -> bool:
    """Nothing more will be written into what is followed."""
    there = logs.attempts(folder)
    if args.attempt is not None and args.attempt >= 0 and there and there[-1] > args.attempt:
        return True
    try:
        state = read_json(folder / "state.json")
    except (ValueError, OSError):
        return False
    return isinstance(state, dict) and state.get("state") in _OVER


def _nothing(folder: Path, args: argparse.Namespace) -> ConfigError:
    there = logs.attempts(folder)
    try:
        os.listdir(folder / "logs" / (f"attempt-{_attempt(folder, args.attempt) or 0:04d}" if there else ""))
    except PermissionError as error:  # no answer about what is in there
        return ConfigError(f"You may not read the logs in {folder}", evidence=str(error), remedy="ask the run's owner")
    except OSError:
        pass
    if args.node or args.supervisor:
        what = f"of {args.node}" if args.node else "of the supervisor"
        return ConfigError(f"There is no log {what} in {folder}", evidence=f"looked in {folder / 'logs'}")
    attempt = _attempt(folder, args.attempt)
    if attempt is None:
        have = f"it has attempts {there[0]} to {there[-1]}" if there else "no attempt has begun"
        remedy = "leave --attempt out for the last one" if there else "`slurm-resilience status` says what it waits for"
        return ConfigError(f"There are no logs of ranks in {folder}", evidence=have, remedy=remedy)
    ranks = list(logs.ranks(folder, attempt))
    have = f"attempt {attempt} has ranks {ranks[0]} to {ranks[-1]}" if ranks else f"attempt {attempt} has none yet"
    return ConfigError(f"There is no log of rank {' '.join(args.rank or ['0'])} in {folder}", evidence=have)
