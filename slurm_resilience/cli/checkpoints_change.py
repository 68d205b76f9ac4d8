"""The ``checkpoints`` verbs that change something: prune, pin, quarantine, release, hand-over."""

from __future__ import annotations

import argparse
import os

from slurm_resilience.checkpoint import names
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.retention import Retention, is_sound
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import progress
from slurm_resilience.cli.checkpoints_pick import THREADS, find, read_again, require_threads, who
from slurm_resilience.cli.checkpoints_text import describe, in_short, print_json, printable, say, short
from slurm_resilience.errors import CheckpointError, ConfigError, ExitCode


def prune(store: CheckpointStore, args: argparse.Namespace) -> int:
    try:
        policy = Retention(args.keep_last, args.every_steps, args.every_hours, args.best, best_is=args.best_is)
    except ValueError as error:
        raise ConfigError(f"This retention makes no sense: {error}") from None
    if args.best is not None:
        _require_metric(store, args.best)
    bad = {} if args.no_verify else _bad_among_kept(store, policy, quiet=args.json)
    going = store.would_prune(policy, bad=bad)
    gone = going if args.dry_run else _removed(store, policy, bad, going, quiet=args.json)
    if args.json:
        return print_json({"removed": [describe(entry) for entry in gone], "dry_run": args.dry_run, "bad": bad})
    for name, why in bad.items():
        say(f"{name} is bad and does not count, so an older one stays: {why}")
    for entry in gone:
        say(f"{'would remove' if args.dry_run else 'removed'} {entry.name}  {entry.bytes / 1e6:.1f} MB")
    if not gone:
        say("nothing to remove")
    return ExitCode.OK


def _removed(store: CheckpointStore, policy: Retention, bad: dict[str, str], going: list[Entry], *, quiet: bool) -> list[Entry]:
    """Those that were removed; says how far it is, since removing terabytes takes minutes."""
    paths, on_their_way = [store.path(entry) for entry in going], store.root / names.GONE
    if quiet or not paths:
        return store.prune(policy, wait=True, bad=bad)

    def done() -> int:
        left = sum(path.exists() for path in paths) + (len(os.listdir(on_their_way)) if on_their_way.exists() else 0)
        return max(0, len(paths) - left)

    with progress.of_count("checkpoints removed", len(paths), done):
        return store.prune(policy, wait=True, bad=bad)


def _bad_among_kept(store: CheckpointStore, policy: Retention, *, quiet: bool) -> dict[str, str]:
    """Which of the newest ones that would stay are not whole, and why: others must not be removed for them.

    Nothing is read when nothing would go.
    """
    bad: dict[str, str] = {}
    whole: set[str] = set()
    while going := {entry.name for entry in store.would_prune(policy, bad=bad)}:
        counted = [entry for entry in store.entries() if is_sound(entry, bad) and entry.name not in going]
        unread = [entry for entry in counted[: policy.keep_last] if entry.name not in whole]
        if not unread:
            break
        problems = read_again(store, unread[0], THREADS, quiet=quiet)
        if problems:
            bad[unread[0].name] = in_short(problems)
        else:
            whole.add(unread[0].name)
    return bad


def _require_metric(store: CheckpointStore, metric: str) -> None:
    known = {name for entry in store.entries() if entry.usable for name in entry.metrics}
    if metric not in known:
        raise ConfigError(
            f"No checkpoint in {printable(str(store.root))} has a metric {printable(repr(metric))}",
            evidence=f"recorded are: {printable(', '.join(sorted(known))) or 'none'}",
            remedy="name one of them; the loss and what checkpoint.keep_best names are recorded",
        )


def pin(store: CheckpointStore, args: argparse.Namespace) -> int:
    return _changed(store.pin(find(store, args.name), pinned=not args.off), args)


def quarantine(store: CheckpointStore, args: argparse.Namespace) -> int:
    if not args.reason.strip():
        raise ConfigError("--reason is empty", remedy="say why in a few words, for whoever finds it quarantined")
    return _changed(store.quarantine(find(store, args.name), args.reason, by=who()), args)


def release(store: CheckpointStore, args: argparse.Namespace) -> int:
    require_threads(args.threads)
    entry = find(store, args.name)
    problems = read_again(store, entry, args.threads, quiet=args.json)
    if problems and not args.force:
        raise CheckpointError(
            f"{entry.name} is bad and is not released",
            evidence=printable(in_short(problems)),
            remedy="leave it quarantined, or put back the files that were committed; with --force it is released all the same",
        )
    return _changed(store.release(entry, doubt=in_short(problems) if problems else ""), args)


def hand_over(store: CheckpointStore, args: argparse.Namespace) -> int:
    """The other run's next attempt gets a number above all that the root has seen, so that what it saves is the newest."""
    from slurm_resilience.runtime.run_folder import RunFolder

    folder = RunFolder(args.to)
    run, status = folder.run(), folder.status()
    run_id = str(run.get("run_id") or "") if run else ""
    if not run_id:
        raise ConfigError(
            f"{printable(args.to)} is no run's folder",
            evidence="there is no run.json with a run_id in it",
            remedy="start that run once (it is refused and touches nothing), then hand over",
        )
    if status is not None and status.state == "running":
        raise ConfigError(f"Run {printable(run_id)} is under way", remedy="let it end first, and start it again afterwards")
    before = store.ownership.owner()
    number = max(folder.attempt(), store.newest_attempt(), *(entry.attempt for entry in store.entries()), 0)
    store.ownership.give(run_id)
    folder.write_attempt(number)
    if args.json:
        return print_json({"root": str(store.root), "before": before or None, "run_id": run_id, "attempt": number})
    say(f"{store.root} belongs to run {run_id} now{f', and to {before} no more' if before not in ('', run_id) else ''}")
    say(f"its next attempt will have a number above {number}")
    return ExitCode.OK


def _changed(entry: Entry, args: argparse.Namespace) -> int:
    if args.json:
        return print_json(describe(entry))
    pinned, reason = ", pinned" * entry.pinned, f" ({short(entry.reason)})" if entry.reason else ""
    say(f"{entry.name}: {entry.state!s}{pinned}{reason}")
    if args.action == "release" and not entry.usable:
        say("its quarantine is taken back, and it stays unusable while its manifest cannot be read")
    return ExitCode.OK
