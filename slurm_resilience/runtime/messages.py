"""What agent and supervisor say to each other: JSON lines over TCP, every message typed, checked and bounded.

One message is one dataclass; on the wire it is one line ``{"m": kind, field: value, …}`` of at most 1 MiB.  Fields that we
do not know are passed over (a newer peer of the same version may add some); a missing or ill-typed one makes the
line :class:`Garbage`, never an exception in the reader's loop.

Order of a connection: the agent sends :class:`Hello`, the supervisor answers :class:`Welcome`; nothing else counts before.
Both prove that they know the token of ``supervisor.json`` without sending it, since another user may own the
port of a supervisor that died.  After that:

====================  ===========================================================================================
supervisor → agent
``welcome``           you are in; obey from now on
``ping``              I am alive, and your beat ``n`` was the last that I heard (this renews the agent's lease)
``store``             host c10d's store for this attempt; answered by ``store_ready`` or ``store_failed``
``launch``            start these ranks; answered by ``launched`` or ``launch_failed``
``order``             write stop/save into the pages of the attempt
``kill``              kill all of the attempt (and everything older) here; answered by ``stopped``
``hint``              leave a word about this node for root's own checks
``quit``              kill everything and end
agent → supervisor
``hello``             who I am, what is still alive here
``warm``              the launcher became able (or unable) to fork ranks
``beat``              every half second, or as ``welcome`` says: progress of all ranks
``seen``              now and then: the longest silences so far, from which limits are learned
``looked``            before a kill: what the ranks were doing, what the kernel said
``launched`` …        the answers named above
``exit``              one rank ended
``fact``              a rank said something (also what was spooled while the supervisor was away)
``warning``           the agent got TERM, USR1 or USR2 from Slurm
``stopped``           proof: nothing of that attempt, nor of an older one, is alive here
``refused``           a message was not obeyed, and why
====================  ===========================================================================================

**The lease.**  Each ``beat`` has a number ``n``; each ``ping`` names the last one heard.  The agent counts its silence limit
from the moment when it *sent* the beat that was acknowledged, so the agent's limit starts no later than the
supervisor's, whatever was frozen, buffered or cut in one direction only.

**At least once.**  What an agent says comes again after a reconnect unless a later beat was acknowledged, and the exits of the
attempt that is still there always do: a supervisor may have died with its mail unread.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from slurm_resilience.runtime.agent_messages import (
    Beat,
    Exit,
    Fact,
    Hello,
    Launched,
    LaunchFailed,
    Looked,
    RankProgress,
    Refused,
    Seen,
    Stopped,
    StoreFailed,
    StoreReady,
    Warm,
    Warned,
)
from slurm_resilience.runtime.message import BEAT_EVERY_S, MAX_LINE_BYTES, WIRE_VERSION, Garbage, Message, WireError
from slurm_resilience.runtime.supervisor_messages import Hint, Kill, Launch, Order, Ping, Quit, Store, Welcome

__all__ = [
    "BEAT_EVERY_S",
    "FROM_AGENT",
    "FROM_SUPERVISOR",
    "MAX_LINE_BYTES",
    "WIRE_VERSION",
    "Beat",
    "Exit",
    "Fact",
    "Garbage",
    "Hello",
    "Hint",
    "Kill",
    "Launch",
    "LaunchFailed",
    "Launched",
    "Looked",
    "Message",
    "Order",
    "Ping",
    "Quit",
    "RankProgress",
    "Refused",
    "Seen",
    "Stopped",
    "Store",
    "StoreFailed",
    "StoreReady",
    "Warm",
    "Warned",
    "Welcome",
    "WireError",
    "parse",
]

FROM_AGENT: tuple[type[Message], ...] = (
    Hello, Warm, Beat, Seen, Looked, StoreReady, StoreFailed, Launched, LaunchFailed, Exit, Fact, Warned, Stopped, Refused,
)  # fmt: skip
FROM_SUPERVISOR: tuple[type[Message], ...] = (Welcome, Ping, Store, Launch, Order, Kill, Hint, Quit)
_KINDS: dict[str, type[Message]] = {kind.kind: kind for kind in (*FROM_AGENT, *FROM_SUPERVISOR)}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list[Any]": lambda value: isinstance(value, list),
    "list[int]": lambda value: isinstance(value, list) and all(map(_is_int, value)),
    "list[str]": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "dict[str, Any]": lambda value: isinstance(value, dict),
}
_FIELDS: dict[type[Message], dict[str, tuple[Callable[[Any], bool], bool, str]]] = {
    kind: {
        item.name: (_CHECKS[str(item.type)], item.default is dataclasses.MISSING, str(item.type))
        for item in dataclasses.fields(kind)
    }
    for kind in _KINDS.values()
}


def parse(line: bytes) -> Message:
    """The message in a line; :class:`Garbage` with the reason when there is none.  Never raises."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Garbage(f"not JSON ({error}): {line[:80]!r}")
    kind = _KINDS.get(str(raw.get("m"))) if isinstance(raw, dict) else None
    if kind is None:
        return Garbage(f"not a message that we know: {line[:80]!r}")
    values: dict[str, Any] = {}
    for name, (check, required, wanted) in _FIELDS[kind].items():
        if name in raw:
            if not check(raw[name]):
                return Garbage(f"{kind.kind}.{name} is not {wanted}: {str(raw[name])[:80]!r}")
            values[name] = raw[name]
        elif required:
            return Garbage(f"{kind.kind} has no {name}: {line[:80]!r}")
    return kind(**values)
