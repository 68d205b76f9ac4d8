"""Which checkpoint is meant, who asks, and is it whole?"""

from __future__ import annotations

import getpass
import itertools
import re
import sys

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.checkpoint.verify import Problem, verify
from slurm_resilience.cli import progress
from slurm_resilience.cli.checkpoints_text import MOST_PROBLEMS, printable, short
from slurm_resilience.errors import CheckpointError, ConfigError

LATEST = "latest"
THREADS = 4


def find(store: CheckpointStore, name: str) -> Entry:
    """The entry that NAME means.  Raises :class:`CheckpointError` when it is none, or more than one."""
    if name == LATEST:
        latest = store.latest()
        if latest is None:
            raise nothing_usable(store)
        return latest
    if not name.strip():
        raise ConfigError("NAME is empty", remedy="give a checkpoint's name, a unique beginning of it, its step, or 'latest'")
    entries = store.entries()
    step = int(name) if re.fullmatch(r"[0-9]{1,18}", name) else -1
    found = [entry for entry in entries if entry.name.startswith(name) or entry.step == step]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(entry.name for entry in (found or entries)[:6]) or "none"
    raise CheckpointError(
        f"{'No' if not found else 'More than one'} checkpoint in {printable(str(store.root))} is called {name!r:.80}",
        evidence=f"{'there are' if not found else 'it could be'}: {listed}",
    )


def nothing_usable(store: CheckpointStore) -> CheckpointError:
    found = store.entries()
    why = "; ".join(f"{entry.name}: {short(entry.reason)}" for entry in found[:4])
    return CheckpointError(
        f"There is no usable checkpoint in {printable(str(store.root))}",
        evidence=f"{len(found)} are there, all quarantined: {why}" if found else "there is none at all",
        remedy="'checkpoints verify DIR NAME' says what is wrong with one, 'checkpoints release' takes a false alarm back"
        if found
        else "",
    )


def say_passed_over(store: CheckpointStore, chosen: Entry) -> None:
    """On stderr, so that nobody takes the latest usable one for the newest that was saved."""
    for entry, reason in itertools.islice(store.passed_over(chosen), MOST_PROBLEMS):
        print(f"{entry.name} is newer and passed over: {short(reason)}", file=sys.stderr)


def read_again(store: CheckpointStore, entry: Entry, threads: int, *, quiet: bool) -> list[Problem]:
    with progress.of_bytes(entry.name, entry.bytes, quiet=quiet) as told:
        return verify(store.path(entry), entry if entry.readable else None, threads=threads, progress=told)


def require_threads(threads: int) -> None:
    if threads < 1:
        raise ConfigError(f"--threads {threads} makes no sense", remedy="give at least 1")


def who() -> str:
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):
        return "a user without a name"
