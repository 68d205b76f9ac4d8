"""Which of the many ends that one fault causes was the first?

One rank dies of its own cause; the others die of it, with exceptions that look much more impressive.  The earliest
clue that is not an echo is the origin; when all are echoes, the earliest of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_resilience.errors import EXIT_CODE_OF, Cause

# What ranks say when somebody else has died: gloo, NCCL and c10d's store.  Source: seen in torch 2.6-2.13.
_ECHO = re.compile(
    r"connection (?:reset|closed|refused|was closed)|broken pipe|gloo|nccl|tcpstore|distbackenderror|distnetworkerror"
    r"|diststoreerror|processgroup|remote process has exited|socket timeout|heartbeat monitor",
    re.IGNORECASE,
)
_OOM = re.compile(r"out of memory|outofmemory|memoryerror|cannot allocate memory", re.IGNORECASE)
_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)
_CAUSE_OF_CODE = {int(code): cause for cause, code in EXIT_CODE_OF.items() if cause is not Cause.UNKNOWN}
_CAUSE_OF_TYPE = {
    "ConfigError": Cause.CONFIG_ERROR,
    "NoValidCheckpoint": Cause.BAD_CHECKPOINT,
    "MismatchedCheckpoint": Cause.BAD_CHECKPOINT,
}
# Errors of ours about checkpoints that another attempt may get over: a disk that fails, a leftover of an older attempt.
_MAY_PASS = frozenset({"CheckpointError", "Fenced", "RestoreFailed", "IndexInconsistent", "SaveInFlight"})
_TOLD_BY_CODE = (Cause.CONFIG_ERROR, Cause.BAD_CHECKPOINT)


@dataclass(frozen=True)
class Origin:
    """The first thing that went wrong.  ``since`` is wall-clock seconds; ``signature`` is "" unless the user's code raised,
    ``signal`` unless a signal ended the rank."""

    cause: Cause
    since: float
    node: str
    rank: int | None
    detail: str
    signature: str
    echo: bool
    signal: str = ""


class Evidence:
    """Everything that one attempt left behind about its end, in any order of arrival."""

    def __init__(self) -> None:
        self._seen: list[Origin] = []
        self._said: dict[int, Origin] = {}
        self._ends: dict[int, Origin] = {}
        self._left: list[Origin] = []

    def exception(
        self, *, t: float, node: str, rank: int, kind: str, message: str, step: int | None, exit_code: int | None = None
    ) -> None:
        """A rank's own account of its end; its first one stands for its exit too.  ``exit_code``: of an error of ours."""
        detail = f"{kind}: {message}".strip().rstrip(":")
        cause = _cause_of(kind.rpartition(".")[2], detail, exit_code)
        echo = cause is Cause.RANK_CRASH and _ECHO.search(detail) is not None
        signature = "" if echo or cause is not Cause.RANK_CRASH else _ADDRESS.sub("0x", f"{detail[:500]} at step {step}")
        where = "" if step is None or step <= 0 else f" (after step {step})"
        self._said.setdefault(rank, Origin(cause, t, node, rank, f"{detail}{where}", signature, echo))

    def exit(self, *, t: float, node: str, rank: int, code: int, signal: str, tail: Sequence[str], oom: str = "") -> None:
        """A rank ended that should not have.  ``oom``: how the node knows that it was killed for its memory."""
        last = _last_words(tail)
        how = f"killed by {signal or f'signal {-code}'}" if code < 0 else f"exited with {code}"
        cause = _CAUSE_OF_CODE.get(code, Cause.RANK_CRASH)
        if cause is Cause.RANK_CRASH and code > 0 and _OOM.search(last):
            cause = Cause.OOM
        if oom and code < 0:
            cause, how = Cause.OOM, f"{how}: {oom}"
        echo = code > 0 and cause is Cause.RANK_CRASH and _ECHO.search(" ".join(tail[-5:])) is not None
        detail = f"{how}; last line of its log: {last[:300]}" if last else how
        self._ends.setdefault(rank, Origin(cause, t, node, rank, detail, "", echo, signal))

    def pinpoint(self, *, rank: int, node: str, detail: str) -> None:
        """The hang that was seen is this rank's."""
        self._seen = [
            replace(each, rank=rank, node=node, detail=detail) if each.cause is Cause.HANG else each for each in self._seen
        ]

    def left(self, *, t: float, node: str, rank: int) -> None:
        """A rank went away with code 0 and without having finished: no failure by itself, but the reason for echoes."""
        detail = "exited with 0 before the end, without a word"
        self._left.append(Origin(Cause.RANK_CRASH, t, node, rank, detail, "", False))

    def add(self, cause: Cause, *, t: float, node: str, detail: str, rank: int | None = None) -> None:
        """A fault that was seen from outside: a silent node, a hang, a launch that failed."""
        self._seen.append(Origin(cause, t, node, rank, detail, "", False))

    @property
    def seen(self) -> bool:
        """There is more than a rank's own word for it."""
        return bool(self._seen or self._ends)

    def origin(self) -> Origin | None:
        """The first real clue, None without any."""
        unexplained = [end for rank, end in self._ends.items() if rank not in self._said]
        clues = [*self._seen, *self._said.values(), *unexplained]
        first = min(clues, key=lambda clue: (clue.echo, clue.since), default=None)
        if first is not None and first.echo and self._left:
            return min(self._left, key=lambda clue: clue.since)
        return first


def _last_words(tail: Sequence[str]) -> str:
    """The line of a rank's log that says most about its end: the interpreter's own last word, or else the last line."""
    for number, line in enumerate(tail):
        if line.startswith("Fatal Python error:"):
            where = next((each.strip() for each in tail[number:] if each.startswith('  File "')), "")
            return f"{line.strip()}; {where}" if where else line.strip()
    return next((line.strip() for line in reversed(tail) if line.strip() and not line.startswith("=== attempt ")), "")


def _cause_of(name: str, detail: str, exit_code: int | None) -> Cause:
    """What an exception means.  Errors of ours say it by their exit code, whatever they are called."""
    told = _CAUSE_OF_CODE.get(exit_code) if exit_code is not None and name not in _MAY_PASS else None
    if told in _TOLD_BY_CODE:
        return told
    if name in _CAUSE_OF_TYPE:
        return _CAUSE_OF_TYPE[name]
    return Cause.OOM if _OOM.search(detail) else Cause.RANK_CRASH
