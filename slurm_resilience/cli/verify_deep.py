"""``checkpoints verify --deep``: start the user's own script, have it load and check, and show what it found."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, ConfigError, ExitCode

_SHOWN = 60


def verify_deep(
    store: CheckpointStore, entries: Sequence[Entry], command: Sequence[str], *, ranks: int, quarantine_by: str, as_json: bool
) -> int:
    """The exit code; ``quarantine_by`` (or "") says in whose name bad ones are quarantined."""
    if not command:
        raise ConfigError(
            "--deep needs the command that trains", remedy="slurm-resilience checkpoints verify --deep DIR -- python train.py"
        )
    found = ask(store, entries, command, ranks=ranks)
    for entry, one in zip(entries, found, strict=True):
        if not one["good"] and quarantine_by and entry.usable:
            store.quarantine(entry, one["reason"], by=quarantine_by)
    if as_json:
        print(json.dumps(found))
    else:
        for one in found:
            _show(one)
    return ExitCode.OK if all(one["good"] for one in found) else ExitCode.BAD_CHECKPOINT


def ask(store: CheckpointStore, entries: Sequence[Entry], command: Sequence[str], *, ranks: int) -> list[dict[str, Any]]:
    """What the script says of each entry.  Raises :class:`CheckpointError` when it ends without an answer."""
    from slurm_resilience.training.offline import Request

    with tempfile.TemporaryDirectory(prefix="verify-deep-") as folder:
        answer = Path(folder) / "answer.json"
        request = Request(str(store.root.absolute()), tuple(entry.name for entry in entries), str(answer))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENCE_")}
        shared = {**clean, **request.to_environment(), "RESILIENCE_RUN_DIR": folder}
        # The script's own output must not get into ours: it goes to stderr.
        started = [
            subprocess.Popen(command, env={**shared, **where}, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
            for where in _places(ranks)
        ]
        codes = _wait(started)
        if not answer.exists():
            raise CheckpointError(
                "The script ended before run.resume() had verified anything",
                evidence=f"exit codes {codes} of: {shlex.join(command)}; its own words are above",
                remedy="give the command with which the run was started, and --ranks if it needs several",
            )
        found: list[dict[str, Any]] = json.loads(answer.read_text())
        return found


def _wait(started: list[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes; when one rank fails the others, which would wait for it, are ended."""
    waiting = list(started)
    try:
        while waiting:
            for process in list(waiting):
                try:
                    code = process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(process)
                if code:
                    for other in waiting:
                        other.terminate()
    finally:
        for process in waiting:
            process.kill()
    return [process.returncode for process in started]


def _places(ranks: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _show(one: dict[str, Any]) -> None:
    times = f"loaded in {one['load_s']:.2f} s, checked in {one['verify_s']:.2f} s"
    print(f"{one['name']}  {'good' if one['good'] else 'BAD'}  {times}")
    for check in one["checks"]:
        expected, measured = (_cut(str(check[side])) for side in ("expected", "measured"))
        within = f" within {check['tolerance']:g}" if check["tolerance"] else ""
        print(f"    {check['verdict']:<12}  {check['name']}: expected {expected}{within}, measured {measured}")
    if one["reason"]:
        print(f"    {one['reason']}")
