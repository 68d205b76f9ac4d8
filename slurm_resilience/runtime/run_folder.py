"""The folder of one run: the files in it, who writes them, and whether it may be used at all.

Every file is replaced atomically, so a reader on any node sees a whole one or the one before.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from slurm_resilience._atomic import read_json, write_atomic, write_json_atomic
from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import ConfigError, FormatError
from slurm_resilience.runtime.address import SUPERVISOR_FILE, SupervisorAddress
from slurm_resilience.runtime.message import WireError

VERSION = 1
# An empty file finds room on a full disk.
_PROBE_BYTES = 4096
_PATIENCE_S = 600.0
_RETRY_S = 1.0
RunState = Literal["running", "requeued", "complete", "failed", "cancelled"]


@dataclass(frozen=True)
class RunStatus:
    """How the run stands, as the last supervisor left it."""

    state: RunState
    cause: str = ""
    reason: str = ""
    exit_code: int | None = None
    step: int | None = None


class RunFolder:
    """Paths and documents of RUN_DIR.  Nothing is created before :meth:`prepare`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"

    def prepare(self, *, show: Callable[[str], None] = lambda _: None) -> None:
        """Make the folder and prove that it can be written, by us and by nobody else unless the user's umask says so.

        Where a run is under way, its disk may be full for a while, and its ranks may be alive: then this waits, for at most
        ten minutes.  Raises :class:`ConfigError` where it cannot be written.
        """
        deadline, told = time.monotonic() + _PATIENCE_S, False
        while True:
            try:
                self._prepare()
                return
            except ConfigError as error:
                if not self._under_way() or time.monotonic() > deadline:
                    raise
                if not told:
                    show(f"{error.what}; trying again, since a run is under way there. {error.evidence}")
                    told = True
                time.sleep(_RETRY_S)

    def _under_way(self) -> bool:
        try:
            status = self.status()
        except (FormatError, OSError):
            return False
        return status is not None and status.state == "running"

    def _prepare(self) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            probe = self.path / f".probe-{secrets.token_hex(4)}"
            write_atomic(probe, bytes(_PROBE_BYTES), durable=False)
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.path} cannot be written",
                evidence=f"{type(error).__name__}: {error}",
                remedy="give --run-dir a folder on a file system that all nodes of the job share and that you may write to",
            ) from error

    def open_run(
        self, *, argv: list[str], config: dict[str, Any], wrap: Sequence[str] = (), clock: Clock = SYSTEM_CLOCK
    ) -> str:
        """Write ``run.json`` and return the run id: the one of the folder, or a new one for a new folder.

        A folder that already holds a run keeps its id and creation time; the command and the configuration are
        those of now, so that a resubmission with more nodes is one.
        """
        old = self.run()
        run_id = str(old["run_id"]) if old else f"{self.path.name}-{secrets.token_hex(3)}"
        created = old["created"] if old else round(clock.time(), 3)
        run = {"v": VERSION, "run_id": run_id, "created": created, "argv": argv, "wrap": list(wrap), "config": config}
        write_json_atomic(self.path / "run.json", run)
        return run_id

    def run(self) -> dict[str, Any] | None:
        """``run.json``, or None for a folder without a run.  Raises :class:`FormatError` for one of a newer release."""
        return self._read("run.json")

    def attempt(self) -> int:
        """The number of the last attempt of this run; 0 before the first.

        Raises :class:`FormatError` when the file is not a number: guessing one could let an old attempt write again.
        """
        path = self.path / "attempt"
        try:
            return int(path.read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise FormatError(
                f"{path} does not hold an attempt number",
                evidence=str(error),
                remedy="write the number of the newest logs/attempt-NNNN folder into it",
            ) from error

    def write_attempt(self, number: int) -> None:
        """Durable before it returns: from here on everything older is fenced off."""
        write_atomic(self.path / "attempt", f"{number}\n")

    def status(self) -> RunStatus | None:
        """``state.json``, or None before the first supervisor wrote it."""
        value = self._read("state.json")
        if value is None:
            return None
        known: dict[str, Any] = {key: value.get(key) for key in RunStatus.__dataclass_fields__}
        return RunStatus(**known)

    def write_status(self, status: RunStatus) -> None:
        write_json_atomic(self.path / "state.json", {"v": VERSION, **asdict(status)})

    def write_live(self, document: dict[str, Any]) -> None:
        """``live.json``: what every rank does, for those who look."""
        write_json_atomic(self.path / "live.json", document, durable=False)

    def supervisor(self) -> SupervisorAddress | None:
        """``supervisor.json``, or None before the first.  Raises :class:`ConfigError` when it cannot be believed."""
        try:
            return SupervisorAddress.read(self.path)
        except WireError as error:
            raise ConfigError(
                error.what,
                evidence=error.evidence,
                remedy=f"if no job works on this run any more, remove {self.path / SUPERVISOR_FILE}; its epochs stay fenced",
            ) from error

    def open_log(self, name: str) -> TextIO:
        """A log of the run, to append to, line by line."""
        return open(self.logs / f"{name}.log", "a", encoding="utf-8", buffering=1)

    def write_incident(self, attempt: int, record: dict[str, Any]) -> None:
        """The evidence about the fault that ended an attempt; ``slurm-resilience explain`` reads it."""
        folder = self.path / "incidents"
        folder.mkdir(exist_ok=True)
        write_json_atomic(folder / f"{attempt:04d}.json", {"v": VERSION, "attempt": attempt, **record})

    def start_log(self, node: str) -> Path:
        """What srun said, and the agent before it had a log of its own."""
        return self.logs / f"start-{node}.log"

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            value = read_json(path)
        except ValueError as error:
            raise FormatError(
                f"{path} is not JSON", evidence=str(error), remedy="move the file away if nothing else runs here"
            ) from error
        if value is None:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("v"), int) or value["v"] > VERSION:
            raise FormatError(
                f"{path} was not written by this release",
                evidence=f"its version is {value.get('v') if isinstance(value, dict) else None!r}; we read up to {VERSION}",
                remedy="use the newer release of slurm-resilience, or another run folder",
            )
        return value
