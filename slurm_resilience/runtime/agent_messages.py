"""What an agent says to the supervisor; the conversation is described in :mod:`messages`."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from slurm_resilience.runtime.message import WIRE_VERSION, Message, proof_of


class RankProgress(NamedTuple):
    """One rank in a beat.  ``age_s``: since its last sign of life; ``phase`` is a :class:`progress.page.Phase`.

    ``beats``: how often it said something; ``sections``: what is open, as :class:`hang.Section` reads it; ``own_s``: what a
    step costs it by itself, over ``own_count`` steps; ``quiet_s``: for how long nothing was seen of it from outside.
    """

    step: int
    phase: int
    age_s: float
    done: bool
    phase_age_s: float
    beats: int = 1
    sections: tuple[Any, ...] = ()
    own_s: float = 0.0
    own_count: int = 0
    quiet_s: float = 0.0

    @classmethod
    def parse(cls, raw: list[Any]) -> RankProgress:
        """From a beat's list, which newer agents may make longer."""
        step, phase, age_s, done, phase_age_s = raw[:5]
        known = (int(step), int(phase), float(age_s), bool(done), float(phase_age_s))
        if len(raw) < 10:
            return cls(*known, beats=1 if known[0] >= 0 or known[1] else 0)
        beats, sections, own_s, own_count, quiet_s = raw[5:10]
        return cls(*known, int(beats), tuple(sections), float(own_s), int(own_count), float(quiet_s))


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
        return cls(v=WIRE_VERSION, nonce=nonce, proof=proof_of(token, "agent", nonce, values["node"]), **values)

    def proves(self, token: str) -> bool:
        """Whether the sender knows the token; the same time is taken whether it does or not."""
        return hmac.compare_digest(self.proof.encode(), proof_of(token, "agent", self.nonce, self.node).encode())


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
    """Sent as often as the welcome says: ``ranks`` maps the rank (as text) to a :class:`RankProgress` list."""

    kind: ClassVar[str] = "beat"
    n: int
    attempt: int
    ranks: dict[str, Any]

    def progress(self) -> dict[int, RankProgress]:
        """Rank → its progress."""
        return {int(rank): RankProgress.parse(raw) for rank, raw in self.ranks.items()}


@dataclass(frozen=True)
class Seen(Message):
    """How often each kind of work was seen on this node, and the longest silence in it: name → [times, seconds]."""

    kind: ClassVar[str] = "seen"
    attempt: int
    work: dict[str, Any]


@dataclass(frozen=True)
class Looked(Message):
    """What was seen before the kill: of each rank (as text; see :mod:`last_look`), and what the node's kernel had said."""

    kind: ClassVar[str] = "looked"
    attempt: int
    ranks: dict[str, Any]
    kernel: list[str]
    seconds: float


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
    ``step``: last step that it reported (-1: none).  ``oom``: how we know that it was killed for its memory, "" if it was not.
    Comes again after a reconnect, since the first may be lost.
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
    oom: str = ""


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
    did it by itself and says so after reconnecting; ``since`` is the wall clock of what it was done for, 0 when told to.
    """

    kind: ClassVar[str] = "stopped"
    attempt: int
    killed: int
    seconds: float
    why: str
    since: float = 0.0


@dataclass(frozen=True)
class Refused(Message):
    """A message of kind ``what`` was not obeyed."""

    kind: ClassVar[str] = "refused"
    what: str
    attempt: int
    why: str
