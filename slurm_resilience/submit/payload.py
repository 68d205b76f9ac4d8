"""A function on its way to the ranks and its result on the way back: the files in RUN_DIR/call.

    function.pkl             the function and its arguments (cloudpickle), whole before anything is queued
    path.json                the submitter's sys.path, so that the ranks import what it could import
    result.pkl               what rank 0 returned, with the attempt that did; replaced atomically
    error-0003-00001.json    the exception of a rank in an attempt

The pickles are in the user's own folder, readable and writable by the user alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json, write_atomic, write_json_atomic
from slurm_resilience.errors import ConfigError

VERSION = 1


@dataclass(frozen=True)
class Call:
    """``function(run, *args, **kwargs)``, or without the ``run``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    with_run: bool = True


@dataclass(frozen=True)
class Result:
    """What rank 0's function returned in ``attempt``."""

    attempt: int
    value: Any


class CallFolder:
    """Both ends of RUN_DIR/call."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._result = self.path / "result.pkl"

    def write(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, with_run: bool = True
    ) -> None:
        """Make the folder and put the function into it.  Raises :class:`ConfigError` for what cannot be pickled."""
        import cloudpickle

        try:
            raw = cloudpickle.dumps(
                {"v": VERSION, "function": function, "args": tuple(args), "kwargs": dict(kwargs), "with_run": with_run}
            )
        except Exception as error:  # any __reduce__ may raise anything
            raise ConfigError(
                f"{getattr(function, '__name__', function)!r} or one of its arguments cannot be sent to the nodes",
                evidence=f"{type(error).__name__}: {error}",
                remedy="pass paths and plain values, and open files, locks and models inside of the function",
            ) from error
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json_atomic(self.path / "path.json", {"v": VERSION, "path": [entry for entry in sys.path if entry]})
        write_atomic(self.path / "function.pkl", raw, mode=0o600)

    def extend_path(self) -> None:
        """Put the submitter's import path behind this process's own."""
        document = read_json(self.path / "path.json")
        sys.path += [entry for entry in (document or {}).get("path", ()) if entry not in sys.path]

    def read(self) -> Call:
        """The function to call.  Raises :class:`ConfigError` when it cannot be loaded here."""
        import cloudpickle

        try:
            whole = cloudpickle.loads((self.path / "function.pkl").read_bytes())
        except Exception as error:  # unpickling runs imports, which may raise anything
            raise ConfigError(
                f"The function in {self.path} cannot be loaded on this node",
                evidence=f"{type(error).__name__}: {error}",
                remedy="the ranks need the same packages and, for your own modules, the same folders as the submitting process",
            ) from error
        return Call(whole["function"], whole["args"], whole["kwargs"], whole.get("with_run", True))

    def write_result(self, result: Result) -> None:
        """Replace the result.  Raises :class:`ConfigError` for a value that cannot be pickled."""
        import cloudpickle

        try:
            raw = cloudpickle.dumps({"v": VERSION, "attempt": result.attempt, "value": result.value})
        except Exception as error:
            raise ConfigError(
                f"What the function returned, a {type(result.value).__name__}, cannot be sent back",
                evidence=f"{type(error).__name__}: {error}",
                remedy="return plain values; save models through checkpoints",
            ) from error
        write_atomic(self._result, raw, mode=0o600)

    def has_result(self) -> bool:
        return self._result.exists()

    def read_result(self) -> Result | None:
        """The last result that was written, None when there is none.  Whether it counts is for the job's state to say."""
        import cloudpickle

        try:
            raw = self._result.read_bytes()
        except FileNotFoundError:
            return None
        whole = cloudpickle.loads(raw)
        return Result(whole["attempt"], whole["value"])

    def write_error(self, attempt: int, rank: int, error: BaseException, trace: str) -> None:
        """Keep what a rank's function raised."""
        write_json_atomic(
            self.path / f"error-{attempt:04d}-{rank:05d}.json",
            {
                "v": VERSION,
                "attempt": attempt,
                "rank": rank,
                "type": type(error).__name__,
                "message": str(error),
                "traceback": trace,
            },
            durable=False,
        )

    def last_error(self) -> dict[str, Any] | None:
        """The exception of the lowest rank in the newest attempt that had one."""
        files = sorted(self.path.glob("error-*.json"))
        if not files:
            return None
        newest = files[-1].name.split("-")[1]
        document: dict[str, Any] | None = read_json(next(file for file in files if file.name.split("-")[1] == newest))
        return document
