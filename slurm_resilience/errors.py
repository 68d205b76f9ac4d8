"""What went wrong, how we know, what to do next: the exceptions, causes and exit codes of the whole package.

Errors are evidence.  Each carries its three parts as fields, builds one paragraph from them in ``__str__``,
and survives pickling, so that a submitting process can show what a node on the other side of the cluster saw.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from typing import Any


class Cause(str, enum.Enum):
    """Why an attempt ended.  The words are part of the public vocabulary: events, budgets and docs use them."""

    PREEMPTION = "preemption"
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    NODE_DRAINED = "node_drained"
    LAUNCH_FAILED = "launch_failed"
    RANK_CRASH = "rank_crash"
    HANG = "hang"
    BAD_CHECKPOINT = "bad_checkpoint"
    OOM = "oom"
    APP_ERROR = "app_error"
    CONFIG_ERROR = "config_error"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class ExitCode(enum.IntEnum):
    """The one table of exit codes.  Each reaches sbatch, and so ``sacct``, unflattened.

    Codes 1, 2 and 126-165 are left to Python, argparse and the shell; 75 is sysexits' "try again".
    """

    OK = 0
    USAGE = 64
    INTERNAL = 70
    REQUEUED = 75
    CONFIG_ERROR = 78
    APP_ERROR = 80
    RANK_CRASH = 81
    HANG = 82
    NODE_LOST = 83
    BAD_CHECKPOINT = 84
    OOM = 85
    CANCELLED = 86
    TIME_LIMIT = 87
    PREEMPTED = 88
    LAUNCH_FAILED = 89


EXIT_CODE_OF: dict[Cause, ExitCode] = {
    Cause.PREEMPTION: ExitCode.PREEMPTED,
    Cause.TIME_LIMIT: ExitCode.TIME_LIMIT,
    Cause.NODE_LOST: ExitCode.NODE_LOST,
    Cause.NODE_DRAINED: ExitCode.NODE_LOST,
    Cause.LAUNCH_FAILED: ExitCode.LAUNCH_FAILED,
    Cause.RANK_CRASH: ExitCode.RANK_CRASH,
    Cause.HANG: ExitCode.HANG,
    Cause.BAD_CHECKPOINT: ExitCode.BAD_CHECKPOINT,
    Cause.OOM: ExitCode.OOM,
    Cause.APP_ERROR: ExitCode.APP_ERROR,
    Cause.CONFIG_ERROR: ExitCode.CONFIG_ERROR,
    Cause.CANCELLED: ExitCode.CANCELLED,
    Cause.UNKNOWN: ExitCode.INTERNAL,
}


class ResilienceError(Exception):
    """One paragraph that says what happened, how we know, and what to do.

    ``exit_code`` is what a command ends with when this error reaches its top.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, evidence: str = "", remedy: str = "") -> None:
        super().__init__(what, evidence, remedy)
        self.what = what
        self.evidence = evidence
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.what]
        if self.evidence:
            parts.append(f"How we know: {self.evidence}")
        if self.remedy:
            parts.append(f"What to do: {self.remedy}")
        return " ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what, self.evidence, self.remedy))


def _rebuild(kind: type[ResilienceError], what: str, evidence: str, remedy: str) -> ResilienceError:
    return kind(what, evidence=evidence, remedy=remedy)


class ConfigError(ResilienceError):
    """What the user asked for makes no sense.  On the command line: nothing was queued, started or written."""

    exit_code = ExitCode.CONFIG_ERROR


class SubmitError(ResilienceError):
    """Slurm refused the job, or is not there."""

    exit_code = ExitCode.LAUNCH_FAILED


class SlurmError(ResilienceError):
    """A Slurm command failed, timed out or answered something that we do not understand."""

    exit_code = ExitCode.LAUNCH_FAILED


class LaunchError(ResilienceError):
    """Agents or ranks could not be started."""

    exit_code = ExitCode.LAUNCH_FAILED


class CheckpointError(ResilienceError):
    """A checkpoint could not be written, read or trusted."""

    exit_code = ExitCode.BAD_CHECKPOINT


class NoValidCheckpoint(CheckpointError):
    """Entries exist, and none of them may be resumed from."""


class Fenced(CheckpointError):
    """A newer attempt owns the checkpoint root; this process is a leftover and must not write."""


class FormatError(ResilienceError):
    """A file or message was written by a newer release, or is not ours at all."""


class SandboxError(ResilienceError):
    """The sandbox cannot be started, stopped or hurt as asked."""


class SandboxMisuse(SandboxError):
    """What was asked for cannot be done to the sandbox as it stands: it is not up, not root's, or so already."""

    exit_code = ExitCode.CONFIG_ERROR


_MOST_BESIDE_A_HINT = 12
_ALIKE = 0.7


def nearest(word: str, valid: Iterable[str]) -> str:
    """The sentence that helps after a typo: the nearest valid word first, then the others unless they would bury it."""
    words = sorted(valid)
    bare = {each.lstrip("-") or each: each for each in reversed(words)}  # dashes would make all options alike
    meant = word.lstrip("-")
    # In short words two swapped letters, or an end that is missing, leave little that is alike.
    plain = [each for each in bare if sorted(each) == sorted(meant) or (len(meant) > 1 and each.startswith(meant))]
    close = difflib.get_close_matches(meant, plain or bare, n=1, cutoff=0.0 if plain else _ALIKE)
    if close and len(words) > _MOST_BESIDE_A_HINT:
        return f"did you mean {bare[close[0]]!r}?"
    hint = f"did you mean {bare[close[0]]!r}? " if close else ""
    return f"{hint}valid: {', '.join(words)}"
