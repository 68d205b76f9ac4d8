"""List, check, repair and keep the checkpoints of a run.

DIR is a checkpoint root, or the folder of a run that has one.  NAME is a checkpoint's name, a unique beginning of it,
its step, or 'latest'.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint import filesystem, names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import verify
from slurm_resilience.errors import CheckpointError, ConfigError, ExitCode

_LATEST = "latest"


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("dir", metavar="DIR", help="checkpoint root, or run folder")
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    add("list", "all checkpoints, newest first")
    show = add("show", "one checkpoint: where it comes from, what is in it")
    show.add_argument("name", metavar="NAME", nargs="?", default=_LATEST)
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
    prune = add("prune", "remove old checkpoints")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="usable checkpoints to keep")
    prune.add_argument("--every-steps", type=int, metavar="N", help="also keep the first of every N steps")
    prune.add_argument("--every-hours", type=float, metavar="H", help="also keep the first of every H hours")
    prune.add_argument("--best", metavar="METRIC", help="also keep the one with the best METRIC")
    prune.add_argument(
        "--best-is", choices=("lowest", "highest"), default="lowest", help="which METRIC is best (default: lowest)"
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would go")
    pin = add("pin", "keep a checkpoint whatever retention says")
    pin.add_argument("name", metavar="NAME")
    pin.add_argument("--off", action="store_true", help="stop keeping it")
    quarantine = add("quarantine", "never resume from a checkpoint again")
    quarantine.add_argument("name", metavar="NAME")
    quarantine.add_argument("--reason", required=True, help="why; shown wherever the checkpoint is listed")
    release = add("release", "take a quarantine back")
    release.add_argument("name", metavar="NAME")


def execute(args: argparse.Namespace) -> int:
    store = CheckpointStore.open(_root(Path(args.dir)))
    return _ACTIONS[args.action](store, args)


def _root(given: Path) -> Path:
    """The checkpoint root that DIR means.  Raises :class:`ConfigError` when there is none."""
    for path in (given, given / "checkpoints"):
        if any((path / name).exists() for name in (names.HEAD, names.HISTORY, names.FENCE)) or _has_checkpoints(path):
            return path
    raise ConfigError(
        f"{given} holds no checkpoints",
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
        return _print_json(
            {
                "root": str(store.root),
                "filesystem": str(filesystem.of(store.root)),
                "attempt": store.newest_attempt(),
                "latest": latest.name if latest else None,
                "checkpoints": [_describe(entry) for entry in entries],
                "writing": [{"name": entry.name, "step": entry.step, "attempt": entry.attempt} for entry in writing],
            }
        )
    if not entries:
        print(f"no checkpoints in {store.root}")
    for entry in writing:
        print(f"  {entry.name}  being written by attempt {entry.attempt}, or left behind; it does not count")
    for entry in entries:
        marks = "  pinned" * entry.pinned + f"  load begun {entry.attempts}x" * bool(entry.attempts)
        reason = f"  ({entry.by}: {entry.reason})" if entry.reason else ""
        alarm = f"  ! {entry.alarm}" if entry.alarm else ""
        sign = "*" if latest is not None and entry.name == latest.name else " "
        age = _age(time.time() - entry.committed_at) if entry.committed_at else "?"
        size = f"{entry.bytes / 1e6:10.1f} MB"
        print(f"{sign} {entry.name}  {age:>8}  {size}  {entry.world:>4} ranks  {entry.state!s}{marks}{reason}{alarm}")
    return ExitCode.OK


def _show(store: CheckpointStore, args: argparse.Namespace) -> int:
    entry = _find(store, args.name)
    manifest = store.manifest(entry)
    document = {
        **_describe(entry),
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
        return _print_json(document)
    for key, value in document.items():
        if key == "tensors":
            print(f"tensors ({len(manifest.tensors)}):")
            for name, about in manifest.tensors.items():
                print(f"  {name}  {about['dtype']}  {tuple(about['shape'])}")
        elif key == "items":
            for item in manifest.items:
                print(f"  {item.file}  {item.offset:>12}  {item.length:>12}  {item.key} {list(item.at)}")
        elif value not in ("", {}, None):
            print(f"{key}: {value if isinstance(value, (str, int, float, bool)) else json.dumps(value, default=str)}")
    return ExitCode.OK


def _verify(store: CheckpointStore, args: argparse.Namespace) -> int:
    wanted = args.checkpoint if args.deep else args.name
    if args.all and wanted:
        raise ConfigError("--all and names do not go together")
    if args.all:
        entries = [entry for entry in store.entries() if entry.usable]
    else:
        entries = [_find(store, name) for name in wanted or [_LATEST]]
    if args.deep:
        from slurm_resilience.cli.verify_deep import verify_deep

        by = _who() if args.quarantine else ""
        return verify_deep(store, entries, args.name, ranks=args.ranks, quarantine_by=by, as_json=args.json)
    if args.checkpoint or args.ranks != 1:
        raise ConfigError("--checkpoint and --ranks belong to --deep", remedy="name the checkpoints after DIR")
    results = []
    for entry in entries:
        began = time.monotonic()
        with _progress(entry, quiet=args.json) as progress:
            problems = verify(store.path(entry), entry, threads=args.threads, progress=progress)
        if problems and args.quarantine and entry.usable:
            store.quarantine(entry, "; ".join(map(str, problems[:3])), by=_who())
        results.append((entry, problems, time.monotonic() - began))
    if args.json:
        _print_json(
            [
                {"name": entry.name, "step": entry.step, "good": not problems, "seconds": round(seconds, 3),
                 "problems": [problem.to_json() for problem in problems]}
                for entry, problems, seconds in results
            ]
        )  # fmt: skip
    else:
        for entry, problems, seconds in results:
            print(f"{entry.name}  {'BAD' if problems else 'good'}  {entry.bytes / 1e6:.1f} MB in {seconds:.2f} s")
            for problem in problems:
                print(f"    {problem}")
    return ExitCode.BAD_CHECKPOINT if any(problems for _, problems, _ in results) else ExitCode.OK


def _rebuild(store: CheckpointStore, args: argparse.Namespace) -> int:
    before = store.index.lookup()
    after = store.index.newest_usable() if args.dry_run else store.rebuild()
    document = {
        "changed": [entry.name for entry in before or []] != [entry.name for entry in after],
        "written": not args.dry_run,
        "before": None if before is None else [entry.name for entry in before],
        "after": [entry.name for entry in after],
    }
    if args.json:
        return _print_json(document)
    print(f"the index {'would name' if args.dry_run else 'names'}: {', '.join(entry.name for entry in after) or 'nothing'}")
    print("it was the same before" if not document["changed"] else f"before: {document['before']}")
    return ExitCode.OK


def _prune(store: CheckpointStore, args: argparse.Namespace) -> int:
    try:
        policy = Retention(args.keep_last, args.every_steps, args.every_hours, args.best, best_is=args.best_is)
    except ValueError as error:
        raise ConfigError(f"This retention makes no sense: {error}") from None
    gone = store.would_prune(policy) if args.dry_run else store.prune(policy, wait=True)
    if args.json:
        return _print_json({"removed": [_describe(entry) for entry in gone], "dry_run": args.dry_run})
    for entry in gone:
        print(f"{'would remove' if args.dry_run else 'removed'} {entry.name}  {entry.bytes / 1e6:.1f} MB")
    if not gone:
        print("nothing to remove")
    return ExitCode.OK


def _pin(store: CheckpointStore, args: argparse.Namespace) -> int:
    return _changed(store.pin(_find(store, args.name), pinned=not args.off), args)


def _quarantine(store: CheckpointStore, args: argparse.Namespace) -> int:
    return _changed(store.quarantine(_find(store, args.name), args.reason, by=_who()), args)


def _release(store: CheckpointStore, args: argparse.Namespace) -> int:
    return _changed(store.release(_find(store, args.name)), args)


_ACTIONS: dict[str, Callable[[CheckpointStore, argparse.Namespace], int]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "rebuild": _rebuild,
    "prune": _prune,
    "pin": _pin,
    "quarantine": _quarantine,
    "release": _release,
}


def _changed(entry: Entry, args: argparse.Namespace) -> int:
    if args.json:
        return _print_json(_describe(entry))
    print(f"{entry.name}: {entry.state!s}{', pinned' if entry.pinned else ''}{f' ({entry.reason})' if entry.reason else ''}")
    return ExitCode.OK


def _find(store: CheckpointStore, name: str) -> Entry:
    """The entry that NAME means.  Raises :class:`CheckpointError` when it is none, or more than one."""
    if name == _LATEST:
        latest = store.latest()
        if latest is None:
            raise CheckpointError(f"There is no usable checkpoint in {store.root}")
        return latest
    found = [entry for entry in store.entries() if entry.name.startswith(name) or (name.isdigit() and entry.step == int(name))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(entry.name for entry in (found or store.entries())[:6]) or "none"
    raise CheckpointError(
        f"{'No' if not found else 'More than one'} checkpoint in {store.root} is called {name!r}",
        evidence=f"{'there are' if not found else 'it could be'}: {listed}",
    )


def _describe(entry: Entry) -> dict[str, Any]:
    return {"usable": entry.usable, **entry.to_json(), "state": str(entry.state)}


def _print_json(document: Any) -> int:
    print(json.dumps(document, default=str))
    return ExitCode.OK


def _who() -> str:
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):
        return "a user without a name"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@contextlib.contextmanager
def _progress(entry: Entry, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(entry.name, total=entry.bytes)
        yield lambda read: bar.advance(task, read)
