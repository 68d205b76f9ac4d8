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
``quit``              kill everything and end
agent → supervisor
``hello``             who I am, what is still alive here
``warm``              the launcher became able (or unable) to fork ranks
``beat``              every half second: progress of all ranks
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
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from slurm_resilience.errors import FormatError

WIRE_VERSION = 1
MAX_LINE_BYTES = 1 << 20
BEAT_EVERY_S = 0.5


class WireError(FormatError):
    """A message cannot be sent, or was not one of ours."""


class RankProgress(NamedTuple):
    """One rank in a beat.  ``age_s``: since its last sign of life; ``phase`` is a :class:`progress.page.Phase`."""

    step: int
    phase: int
    age_s: float
    done: bool
    phase_age_s: float

    @classmethod
    def parse(cls, raw: list[Any]) -> RankProgress:
        """From a beat's list, which newer agents may make longer."""
        step, phase, age_s, done, phase_age_s = raw[:5]
        return cls(int(step), int(phase), float(age_s), bool(done), float(phase_age_s))


@dataclass(frozen=True)
class Message:
    """Base of all messages; ``kind`` is the word on the wire."""

    kind: ClassVar[str] = ""

    def to_line(self) -> bytes:
        """One line with its newline.  Raises :class:`WireError` when it would be over the limit."""
        values = {name: getattr(self, name) for name in _FIELDS[type(self)]}
        raw = json.dumps({"m": self.kind, **values}, separators=(",", ":")).encode() + b"\n"
        if len(raw) > MAX_LINE_BYTES:
            raise WireError(f"a {self.kind!r} message of {len(raw)} bytes is over the limit of {MAX_LINE_BYTES}")
        return raw


# --- agent → supervisor -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello(Message):
    """The agent's first message; build it with :meth:`build`, check it with :meth:`proves`.

    ``address`` is the agent's end of this connection: other nodes reach it where the supervisor does.  ``attempt`` and
    ``ranks`` say what is still alive here (attempt 0: nothing).  ``cold_reason`` says why ``warm`` is false.
    """

    kind: ClassVar[str] = "hello"
    v: int
    nonce: str
    proof: str
    node: str
    pid: int
    boot_id: str
    job_id: str
    restart: int
    address: str
    warm: bool
    cold_reason: str
    attempt: int
    ranks: list[int]

    @classmethod
    def build(cls, token: str, **values: Any) -> Hello:
        """A greeting that proves knowledge of ``token`` with a nonce of its own."""
        nonce = secrets.token_hex(16)
        return cls(v=WIRE_VERSION, nonce=nonce, proof=_proof(token, "agent", nonce, values["node"]), **values)

    def proves(self, token: str) -> bool:
        """Whether the sender knows the token; the same time is taken whether it does or not."""
        return hmac.compare_digest(self.proof.encode(), _proof(token, "agent", self.nonce, self.node).encode())


@dataclass(frozen=True)
class Warm(Message):
    """The launcher can fork ranks (``warm``), or cannot and ``reason`` says why.  ``seconds``: what preloading took.

    While neither is said yet, the launcher is still importing.  With ``usable`` false there is no launcher at all
    right now (it died and is being restarted): wait for the next ``warm``.
    """

    kind: ClassVar[str] = "warm"
    warm: bool
    reason: str
    seconds: float
    usable: bool = True


@dataclass(frozen=True)
class Beat(Message):
    """Sent every BEAT_EVERY_S: ``ranks`` maps the rank (as text) to a :class:`RankProgress` list."""

    kind: ClassVar[str] = "beat"
    n: int
    attempt: int
    ranks: dict[str, Any]

    def progress(self) -> dict[int, RankProgress]:
        """Rank → its progress."""
        return {int(rank): RankProgress.parse(raw) for rank, raw in self.ranks.items()}


@dataclass(frozen=True)
class StoreReady(Message):
    """The store of this attempt listens on ``port`` of this agent's address: MASTER_PORT."""

    kind: ClassVar[str] = "store_ready"
    attempt: int
    port: int


@dataclass(frozen=True)
class StoreFailed(Message):
    """No store here for this attempt (no torch in the launcher, it cannot listen), or the store died later on."""

    kind: ClassVar[str] = "store_failed"
    attempt: int
    why: str


@dataclass(frozen=True)
class Launched(Message):
    """All ranks of this node were started.  ``warm`` false: by exec, and ``reason`` says why."""

    kind: ClassVar[str] = "launched"
    attempt: int
    pids: dict[str, Any]
    warm: bool
    reason: str
    seconds: float


@dataclass(frozen=True)
class LaunchFailed(Message):
    """The ranks could not be started here; none of them is left alive."""

    kind: ClassVar[str] = "launch_failed"
    attempt: int
    why: str


@dataclass(frozen=True)
class Exit(Message):
    """One rank ended.  ``code`` as Python has it: 0–255, or minus the signal's number; ``signal`` its name or "".

    ``done``: it had said that it reached its end.  ``t``: wall clock of the agent.  ``tail``: last lines of its log.
    ``step``: last step that it reported (-1: none).  Comes again after a reconnect, since the first may be lost.
    """

    kind: ClassVar[str] = "exit"
    attempt: int
    rank: int
    code: int
    signal: str
    done: bool
    t: float
    tail: list[str]
    step: int


@dataclass(frozen=True)
class Fact(Message):
    """What a rank said; ``fact`` is its kind (``first_step``, ``checkpoint_committed`` …), ``t`` when the agent heard it."""

    kind: ClassVar[str] = "fact"
    attempt: int
    rank: int
    fact: str
    fields: dict[str, Any]
    t: float


@dataclass(frozen=True)
class Warned(Message):
    """The agent got ``signal`` ("SIGTERM", "SIGUSR1" or "SIGUSR2") at wall time ``t``; it lives on."""

    kind: ClassVar[str] = "warning"
    signal: str
    t: float


@dataclass(frozen=True)
class Stopped(Message):
    """Proof that no process of ``attempt`` or an older one is alive on this node.

    ``killed``: processes that had to be killed.  ``why``: "kill" (asked to), or "silence" / "lost" when the agent
    did it by itself and says so after reconnecting.
    """

    kind: ClassVar[str] = "stopped"
    attempt: int
    killed: int
    seconds: float
    why: str


@dataclass(frozen=True)
class Refused(Message):
    """A message of kind ``what`` was not obeyed."""

    kind: ClassVar[str] = "refused"
    what: str
    attempt: int
    why: str


# --- supervisor → agent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(Message):
    """The answer to a good hello; the agent obeys nothing before it."""

    kind: ClassVar[str] = "welcome"
    v: int
    proof: str

    @classmethod
    def build(cls, token: str, hello: Hello) -> Welcome:
        """The answer that only somebody who knows the token can give to this hello."""
        return cls(v=WIRE_VERSION, proof=_proof(token, "supervisor", hello.nonce, hello.node))

    def proves(self, token: str, hello: Hello) -> bool:
        """Whether the answer comes from somebody who knows the token."""
        return hmac.compare_digest(self.proof.encode(), _proof(token, "supervisor", hello.nonce, hello.node).encode())


@dataclass(frozen=True)
class Ping(Message):
    """Answer every beat with one at once, with ``seen=connection.seen``; it renews the agent's lease."""

    kind: ClassVar[str] = "ping"
    seen: int


@dataclass(frozen=True)
class Store(Message):
    """Host the store of this attempt here.  Send it to the node of rank 0 before ``launch``."""

    kind: ClassVar[str] = "store"
    attempt: int


@dataclass(frozen=True)
class Launch(Message):
    """Start these ranks here.

    ``ranks``: ``[[rank, local_rank], …]``.  ``argv`` is the user's command as given after ``--``.  ``env``: variables on
    top of the agent's own environment (null removes one).  ``settings`` and ``plan``: see RankContract.  ``header``: the
    line that opens each rank's log.

    ``wait_warm``: let the launch wait until the launcher has finished its preload (one that may not fork then starts
    the ranks cold all the same); otherwise a launcher that is not warm yet means a cold start at once.
    ``store_hosted``: a ``store_ready`` gave ``master_port``; otherwise rank 0 makes c10d's store there by itself.
    """

    kind: ClassVar[str] = "launch"
    attempt: int
    world: int
    ranks: list[Any]
    group_rank: int
    groups: int
    master_addr: str
    master_port: int
    argv: list[str]
    cwd: str
    env: dict[str, Any]
    checkpoints: str
    settings: dict[str, Any]
    plan: dict[str, Any]
    header: str = ""
    wait_warm: bool = True
    store_hosted: bool = True


@dataclass(frozen=True)
class Order(Message):
    """Ask the ranks of the attempt to stop and/or to save.  ``save`` is a number that grows with each request.

    ``deadline`` is wall-clock seconds, null where there is none.  Only the pages are written; nobody is killed.
    """

    kind: ClassVar[str] = "order"
    attempt: int
    stop: bool
    save: int
    deadline: float | None
    cause: str


@dataclass(frozen=True)
class Kill(Message):
    """Kill everything of ``attempt`` and older.  With ``grace_s`` over 0, TERM goes first and KILL after that time."""

    kind: ClassVar[str] = "kill"
    attempt: int
    grace_s: float = 0.0


@dataclass(frozen=True)
class Quit(Message):
    """Kill everything of this run on the node and end with exit code 0."""

    kind: ClassVar[str] = "quit"
    why: str = ""


# --- what the reader also gets ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Garbage(Message):
    """A line that was not one of our messages; never sent.  ``why`` is evidence for the log."""

    kind: ClassVar[str] = ""
    why: str


FROM_AGENT: tuple[type[Message], ...] = (
    Hello, Warm, Beat, StoreReady, StoreFailed, Launched, LaunchFailed, Exit, Fact, Warned, Stopped, Refused,
)  # fmt: skip
FROM_SUPERVISOR: tuple[type[Message], ...] = (Welcome, Ping, Store, Launch, Order, Kill, Quit)
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


def _proof(token: str, role: str, nonce: str, node: str) -> str:
    return hmac.new(token.encode(), f"{role}\0{nonce}\0{node}".encode(), "sha256").hexdigest()
