"""List, check, repair and keep the checkpoints of a run.

DIR is a checkpoint root, or the folder of a run that has one.  NAME is a checkpoint's name, a unique beginning of it,
its step, or 'latest'.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint import filesystem, names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.index import BY_SCAN
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import checkpoints_export
from slurm_resilience.cli.checkpoints_change import hand_over, pin, prune, quarantine, release
from slurm_resilience.cli.checkpoints_pick import (
    LATEST,
    find,
    nothing_usable,
    read_again,
    require_threads,
    say_passed_over,
    who,
)
from slurm_resilience.cli.checkpoints_text import MOST_PROBLEMS, describe, in_short, print_json, printable, say, short
from slurm_resilience.errors import CheckpointError, ConfigError, ExitCode

_TOLD_FIRST = ("name", "state", "by", "reason", "alarm", "doubt", "pinned", "step", "attempt", "world", "mesh", "job_id",
               "node", "metrics", "versions", "path")  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("dir", metavar="DIR", help="checkpoint root, or run folder")
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    add("list", "all checkpoints, newest first")
    show = add("show", "one checkpoint: where it comes from, what is in it")
    show.add_argument("name", metavar="NAME", nargs="?", default=LATEST)
    show.add_argument("--all", action="store_true", help="everything: files, tensors, what else was saved with them")
    show.add_argument("--items", action="store_true", help="also every tensor, with its file and place")
    check = add("verify", "read a checkpoint again and compare every digest; ends with 84 when one is bad")
    check.add_argument("name", metavar="NAME", nargs="*", default=[], help="default: the latest")
    check.add_argument("--all", action="store_true", help="every checkpoint that is not quarantined")
    check.add_argument("--threads", type=int, default=4, help="how many files are read at once (default: 4)")
    check.add_argument("--quarantine", action="store_true", help="quarantine those that are bad")
    check.add_argument(
        "--deep",
        action="store_true",
        help="load it by the script that trains, given after --, and ask all that a resume asks; trains and marks nothing",
    )
    check.add_argument(
        "--checkpoint", metavar="NAME", action="append", default=[], help="with --deep: which (default: the latest)"
    )
    check.add_argument("--ranks", type=int, default=1, help="with --deep: processes to start the script in (default: 1)")
    rebuild = add("rebuild", "make the index anew from the checkpoints' own manifests")
    rebuild.add_argument("--dry-run", action="store_true", help="say what the index would name")
    prune_ = add("prune", "remove old checkpoints")
    prune_.add_argument("--keep-last", type=int, required=True, metavar="N", help="usable checkpoints to keep")
    prune_.add_argument("--every-steps", type=int, metavar="N", help="also keep the first of every N steps")
    prune_.add_argument("--every-hours", type=float, metavar="H", help="also keep the first of every H hours")
    prune_.add_argument("--best", metavar="METRIC", help="also keep the one with the best METRIC")
    prune_.add_argument(
        "--best-is", choices=("lowest", "highest"), default="lowest", help="which METRIC is best (default: lowest)"
    )
    prune_.add_argument("--dry-run", action="store_true", help="say what would go")
    prune_.add_argument(
        "--no-verify", action="store_true", help="do not read the newest ones again before others are removed for them"
    )
    pin_ = add("pin", "keep a checkpoint whatever retention says")
    pin_.add_argument("name", metavar="NAME")
    pin_.add_argument("--off", action="store_true", help="stop keeping it")
    quarantine_ = add("quarantine", "never resume from a checkpoint again")
    quarantine_.add_argument("name", metavar="NAME")
    quarantine_.add_argument("--reason", required=True, help="why; shown wherever the checkpoint is listed")
    release_ = add("release", "read a quarantined checkpoint again and, if every digest holds, take the quarantine back")
    release_.add_argument("name", metavar="NAME")
    release_.add_argument("--threads", type=int, default=4, help="how many files are read at once (default: 4)")
    release_.add_argument("--force", action="store_true", help="also if it is bad; retention then does not count on it")
    hand_over_ = add("hand-over", "give the checkpoints of a run that is over to another run, which then goes on from them")
    hand_over_.add_argument("--to", required=True, metavar="RUN_DIR", help="the folder of the run that shall have them")
    checkpoints_export.configure(add("export", "the weights of a checkpoint as one file for others, verified on the way"))


def execute(args: argparse.Namespace) -> int:
    try:
        return _ACTIONS[args.action](CheckpointStore.open(_root(Path(args.dir))), args)
    except (PermissionError, BrokenPipeError):
        raise
    except OSError as error:
        raise CheckpointError(
            printable(f"'checkpoints {args.action}' could not go on in {args.dir}"),
            evidence=printable(f"{type(error).__name__}: {error}"),
            remedy="nothing was lost; see what lies at that path, or whether its file system is there and has room",
        ) from error


def _root(given: Path) -> Path:
    """The checkpoint root that DIR means.  Raises :class:`ConfigError` when there is none."""
    for path in (given, given / "checkpoints"):
        if any((path / name).exists() for name in (names.HEAD, names.HISTORY, names.FENCE)) or _has_checkpoints(path):
            return path
    raise ConfigError(
        f"{printable(str(given))} holds no checkpoints",
        evidence="neither it nor its 'checkpoints' folder has an index or a checkpoint"
        if given.is_dir()
        else "it is no directory",
        remedy="give a run folder, or the directory that the run's checkpoint.dir names",
    )


def _has_checkpoints(path: Path) -> bool:
    return path.is_dir() and any(names.parse(found.name) for found in path.iterdir())


def _list(store: CheckpointStore, args: argparse.Namespace) -> int:
    latest = store.latest()
    entries = store.entries()
    writing = store.unfinished()
    if args.json:
        return print_json(
            {
                "root": str(store.root),
                "filesystem": str(filesystem.of(store.root)),
                "run_id": store.ownership.owner() or None,
                "attempt": store.newest_attempt(),
                "latest": latest.name if latest else None,
                "checkpoints": [describe(entry) for entry in entries],
                "writing": [{"name": entry.name, "step": entry.step, "attempt": entry.attempt} for entry in writing],
            }
        )
    if not entries:
        say(f"no checkpoints in {store.root}")
    for entry in writing:
        say(f"  {entry.name}  being written by attempt {entry.attempt}, or left behind; it does not count")
    for entry in entries:
        marks = "  pinned" * entry.pinned + f"  load begun {entry.attempts}x" * bool(entry.attempts)
        reason = f"  ({short(f'{entry.by}: {entry.reason}')})" if entry.reason else ""
        alarm = f"  ! {short(entry.alarm)}" if entry.alarm else ""
        alarm += f"  ! released although {short(entry.doubt)}" if entry.doubt else ""
        sign = "*" if latest is not None and entry.name == latest.name else " "
        age = _age(time.time() - entry.committed_at) if entry.committed_at else "?"
        size = f"{entry.bytes / 1e6:10.1f} MB"
        world = f"{entry.world:>4} rank{'s' if entry.world != 1 else ' '}"
        say(f"{sign} {entry.name}  {age:>8}  {size}  {world}  {entry.state!s}{marks}{reason}{alarm}")
    return ExitCode.OK


def _show(store: CheckpointStore, args: argparse.Namespace) -> int:
    entry = find(store, args.name)
    if args.name == LATEST:
        say_passed_over(store, entry)
    manifest = store.manifest(entry)
    document = {
        **describe(entry),
        "path": str(store.path(entry)),
        "files": manifest.files,
        "tensors": manifest.tensors,
        "extra": manifest.extra,
        "content": manifest.content,
        "versions": manifest.versions,
    }
    if args.items:
        document["items"] = [
            {
                "tensor": item.key,
                "file": item.file,
                "offset": item.offset,
                "length": item.length,
                "at": item.at,
                "shape": item.shape,
                "dtype": item.dtype,
                "xxh3": item.digest,
            }
            for item in manifest.items
        ]
    if args.json:
        return print_json(document)
    if not (args.all or args.items):
        _summary(document)
        return ExitCode.OK
    for key, value in document.items():
        if key == "tensors":
            print(f"tensors ({len(manifest.tensors)}):")
            for name, about in manifest.tensors.items():
                say(f"  {name}  {about.get('dtype', '?')}  {about.get('shape', '?')}")
        elif key == "items":
            for item in manifest.items:
                say(f"  {item.file}  {item.offset:>12}  {item.length:>12}  {item.key} {list(item.at)}")
        elif value not in ("", {}, None):
            say(f"{key}: {value if isinstance(value, (str, int, float, bool)) else json.dumps(value, default=str)}")
    return ExitCode.OK


def _summary(document: dict[str, Any]) -> None:
    """What one looks for first; the rest is counted."""
    tensors, files = document["tensors"], document["files"]
    dtypes = Counter(str(about.get("dtype", "?")) for about in tensors.values())
    told = {key: document[key] for key in _TOLD_FIRST if document.get(key) not in ("", {}, None, False, 0)}
    for key, value in told.items():
        say(f"{key}: {value if isinstance(value, (str, int, float)) else json.dumps(value, default=str)}")
    say(f"files: {len(files)}, {document['bytes'] / 1e6:,.1f} MB")
    say(f"tensors: {len(tensors)} ({', '.join(f'{count} {dtype}' for dtype, count in dtypes.most_common())})")
    say("--all tells everything, --items where each piece of a tensor lies, --json both for programs")


def _verify(store: CheckpointStore, args: argparse.Namespace) -> int:
    wanted = args.checkpoint if args.deep else args.name
    if args.all and wanted:
        raise ConfigError("--all and names do not go together")
    require_threads(args.threads)
    if args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks} makes no sense", remedy="give at least 1")
    if args.all:
        entries = [entry for entry in store.entries() if entry.usable or entry.by == BY_SCAN]
        if not entries:
            raise nothing_usable(store)
    else:
        entries = [find(store, name) for name in wanted or [LATEST]]
        if not wanted:
            say_passed_over(store, entries[0])
    if args.deep:
        from slurm_resilience.cli.verify_deep import verify_deep

        by = who() if args.quarantine else ""
        return verify_deep(store, entries, args.name, ranks=args.ranks, quarantine_by=by, as_json=args.json)
    if args.checkpoint or args.ranks != 1:
        raise ConfigError("--checkpoint and --ranks belong to --deep", remedy="name the checkpoints after DIR")
    results = []
    for entry in entries:
        began = time.monotonic()
        problems = read_again(store, entry, args.threads, quiet=args.json)
        if problems and args.quarantine and (entry.usable or entry.by == BY_SCAN):
            store.quarantine(entry, in_short(problems), by=who())
        results.append((entry, problems, time.monotonic() - began))
    if args.json:
        print_json(
            [
                {"name": entry.name, "step": entry.step, "good": not problems, "seconds": round(seconds, 3),
                 "problems": [problem.to_json() for problem in problems]}
                for entry, problems, seconds in results
            ]
        )  # fmt: skip
    else:
        for entry, problems, seconds in results:
            say(f"{entry.name}  {'BAD' if problems else 'good'}  {entry.bytes / 1e6:.1f} MB in {seconds:.2f} s")
            for problem in problems[:MOST_PROBLEMS]:
                say(f"    {problem}")
            if len(problems) > MOST_PROBLEMS:
                say(f"    and {len(problems) - MOST_PROBLEMS} more; --json has them all")
    return ExitCode.BAD_CHECKPOINT if any(problems for _, problems, _ in results) else ExitCode.OK


def _rebuild(store: CheckpointStore, args: argparse.Namespace) -> int:
    before = store.index.lookup()
    after = store.index.newest_usable() if args.dry_run else store.rebuild()
    document = {
        "changed": before is None or [entry.name for entry in before] != [entry.name for entry in after],
        "written": not args.dry_run,
        "before": None if before is None else [entry.name for entry in before],
        "after": [entry.name for entry in after],
    }
    if args.json:
        return print_json(document)
    say(f"the index {'would name' if args.dry_run else 'names'}: {_listed(after)}")
    if before is None:
        say("before: there was none that can be believed")
    else:
        say(f"before: {_listed(before)}" if document["changed"] else "it was the same before")
    return ExitCode.OK


def _listed(entries: list[Entry]) -> str:
    return ", ".join(entry.name for entry in entries) or "nothing, there is no usable checkpoint"


_ACTIONS: dict[str, Callable[[CheckpointStore, argparse.Namespace], int]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "rebuild": _rebuild,
    "prune": prune,
    "pin": pin,
    "quarantine": quarantine,
    "release": release,
    "hand-over": hand_over,
    "export": checkpoints_export.export,
}


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
