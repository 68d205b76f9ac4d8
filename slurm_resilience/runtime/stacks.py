"""What is a rank doing, going by its stack and by what the kernel shows of it?  And which of several is the one that hangs?

Pure functions of texts and numbers.  A rank that waits for the others in a collective is a victim; one that is anywhere else is
what they wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|/lib64/python\d|<frozen ")
_OURS = re.compile(r"/slurm_resilience/(?:training|checkpoint|runtime|elastic)/")
_BUSY = 0.5
_SWAPS_KB = 100_000
Kind = Literal["collective", "backward", "data", "user", "library", "unknown"]


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Doing:
    """What a rank is doing.  ``place``: the user's own line that it came from; ``what``: a sentence without a subject."""

    kind: Kind
    what: str
    place: str
    stopped: bool = False


def threads(dump: str) -> list[list[Frame]]:
    """The stacks in a dump of faulthandler, innermost call first; the main thread's is the last."""
    found: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (match := _FRAME.match(line)):
            found[-1].append(Frame(match[1], int(match[2]), match[3]))
    return found


def doing(look: Mapping[str, Any]) -> Doing:
    """From one rank's last look (see :mod:`last_look`)."""
    stacks = threads(str(look.get("stacks", "")))
    stack = stacks[-1] if stacks else []
    kind, call = _kind(stack)
    own = next((frame for frame in stack if not _LIBRARY.search(frame.file) and not _OURS.search(frame.file)), None)
    place = str(own or "")
    state, busy = str(look.get("state", "")), float(look.get("cpu") or 0.0)
    at = f" at {place}" if place else ""
    if look.get("tracer"):
        return Doing(kind, f"sits in a debugger (process {look['tracer']}){at}", place, stopped=True)
    if state in ("T", "t"):
        return Doing(kind, f"is stopped by a signal (state {state}){at}", place, stopped=True)
    if state == "D":
        waits = f" in {look['wchan']}" if look.get("wchan") not in (None, "", "0") else ""
        return Doing(kind, f"waits in the kernel{waits} for a device or a file system (state D){at}", place, stopped=True)
    swap = f"; {int(look['swap_kb']) // 1024} MB of it are swapped out" if int(look.get("swap_kb") or 0) > _SWAPS_KB else ""
    if kind == "collective":
        return Doing(kind, f"waits for the others in {call}{f', called{at}' if at else ''}", place)
    if kind == "backward":
        return Doing(kind, f"is in the backward pass{at}, which ends in a collective", place)
    share = f"{busy:.0%} of a processor"
    if kind == "data":
        return Doing(kind, f"waits for its data loader ({call}){f', called{at}' if at else ''}, {share}{swap}", place)
    if not stack:
        how = "it did not answer with its Python stack" if look.get("asked") else "its Python stack is not known"
        if busy >= _BUSY:
            return Doing("unknown", f"uses {share}; {how}{swap}", place)
        waits = f", waits in {look['wchan']}" if look.get("wchan") not in (None, "", "0") else ""
        return Doing("unknown", f"does nothing{waits} ({share}); {how}{swap}", place)
    verb = "runs" if busy >= _BUSY or state == "R" else "stands still"
    inner = f" in {call}" if kind == "library" and call else ""
    return Doing(kind, f"{verb}{inner}{f', called{at}' if inner and at else at} ({share}){swap}", place)


def culprit(looks: Mapping[int, Mapping[str, Any]], named: int | None) -> tuple[int, str] | None:
    """The rank that the others wait for, and the sentence that says why; None when the looks do not tell.

    ``named`` is the rank that the limits named; it stays where nothing speaks against it.
    """
    known = {rank: doing(look) for rank, look in looks.items()}
    if not known:
        return None
    stopped = sorted(rank for rank, each in known.items() if each.stopped)
    if stopped:
        return stopped[0], _sentence(known, stopped[0])
    away = sorted(rank for rank, each in known.items() if each.kind in ("user", "library", "data", "unknown"))
    if away and len(away) < len(known):
        return away[0], _sentence(known, away[0])
    if away:
        chosen = named if named in known else away[0]
        return chosen, _sentence(known, chosen)
    places = Counter(_where(each) for each in known.values())
    if len(places) > 1:
        fewest = min(places.values())
        odd = sorted(rank for rank, each in known.items() if places[_where(each)] == fewest)
        chosen = named if named in odd else odd[0]
        return chosen, f"{_sentence(known, chosen)}; ranks wait in different places, so they will never meet"
    chosen = named if named in known else min(known)
    return chosen, _sentence(known, chosen)


def summary(looks: Mapping[int, Mapping[str, Any]]) -> list[tuple[list[int], str]]:
    """The same sentence once, with the ranks that it is about; rarest first, since that is where the reason is."""
    groups: dict[str, list[int]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault(re.sub(r"\d+% of", "some of", doing(look).what), []).append(rank)
    return [(ranks, doing(looks[ranks[0]]).what) for ranks in sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))]


def _sentence(known: Mapping[int, Doing], rank: int) -> str:
    rest = Counter(_where(each) for who, each in known.items() if who != rank)
    more = ""
    if rest:
        where, times = rest.most_common(1)[0]
        other = next(each for who, each in sorted(known.items()) if who != rank and _where(each) == where)
        more = f"; {times} other{'s' if times > 1 else ''}: {other.what}"
    return f"rank {rank} {known[rank].what}{more}"


def _where(each: Doing) -> str:
    return f"{each.kind} {re.sub(r'[0-9]+% of', '', each.what)}"


def _kind(stack: list[Frame]) -> tuple[Kind, str]:
    """Which kind of place this is, and the call that says so."""
    for frame in stack:
        if frame.file.endswith("torch/distributed/c10d_logger.py"):
            continue
        if frame.file.endswith("torch/distributed/distributed_c10d.py"):
            outer = next((each for each in reversed(stack) if each.file == frame.file), frame)
            return "collective", outer.function
        if re.search(r"/slurm_resilience/training/(?:agreement|world|weighing)\.py$|/checkpoint/dcp/team\.py$", frame.file):
            return "collective", f"the ranks' agreement ({frame.function})"
        if frame.file.endswith("torch/autograd/graph.py") and "backward" in frame.function:
            return "backward", frame.function
        if "/torch/utils/data/" in frame.file or "/torch/multiprocessing/" in frame.file:
            return "data", frame.function
        if "/torch/distributed/fsdp/" in frame.file or "/torch/distributed/_composable" in frame.file:
            return "collective", f"{frame.function} (FSDP)"
        if not _LIBRARY.search(frame.file) and not _OURS.search(frame.file):
            if frame is stack[0]:
                return "user", ""
            break
    return ("library", str(stack[0])) if stack else ("unknown", "")
